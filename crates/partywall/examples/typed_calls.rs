//! Typed calls: `service!` declares the methods of a library once, and makes a trait for the server and a client with a function for each.
//!
//! ```console
//! $ cargo run -p partywall-daemon &                                   # the broker, one per host (or an installed `partywalld`)
//! $ cargo run -p partywall --example typed_calls -- serve             # in one terminal
//! $ cargo run -p partywall --example typed_calls -- find Emma         # in another
//! $ cargo run -p partywall --example typed_calls -- pages 200 300
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one. docs/rpc.md is the guide.

use partywall::Domain;
use partywall::rpc::{CallClient, CallError, CallServer, HeapSlice, IncomingCall, PeerSlice, PlainData};
use zerocopy::{Immutable, IntoBytes, TryFromBytes};

/// A book, as both processes lay it out.
#[derive(Debug, Clone, Copy, TryFromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Book {
    shelf: u32,
    pages: u32,
}
impl PlainData for Book {}

partywall::service! {
    /// A library, as seen from another process.
    pub trait Library, client LibraryClient {
        /// The book of this title.
        fn find(title: &str) -> Option<Book>;
        /// The pages of all books that lie in the client's heap.
        fn pages(books: &HeapSlice<Book>) -> u64;
        /// All books, in the server's heap.
        fn all() -> HeapSlice<Book>;
    }
}

struct SmallLibrary(Vec<(&'static str, Book)>);

impl Library for SmallLibrary {
    fn find(&self, call: &IncomingCall<'_>, title: String) -> Result<Option<Book>, CallError> {
        if title.is_empty() {
            return Err(CallError::application(1, format!("{} asks for a book without a title", call.peer().name)));
        }
        Ok(self.0.iter().find(|(known, _)| *known == title).map(|(_, book)| *book))
    }

    fn pages(&self, _: &IncomingCall<'_>, books: PeerSlice<Book>) -> Result<u64, CallError> {
        // Each element is copied out of the client's memory and checked before it is used.
        books.iter().map(|book| Ok(u64::from(book?.pages))).sum()
    }

    fn all(&self, call: &IncomingCall<'_>) -> Result<HeapSlice<Book>, CallError> {
        let books: Vec<Book> = self.0.iter().map(|(_, book)| *book).collect();
        Ok(HeapSlice::copied(call.heap(), &books)?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some(("serve", [])) => serve(&Domain::join("web")?)?,
        Some(("find", [title])) => {
            let _domain = Domain::join("visitor")?;
            match client()?.find(title)? {
                Some(book) => println!("shelf {}, {} pages", book.shelf, book.pages),
                None => println!("no such book"),
            }
        }
        Some(("pages", numbers @ [_, ..])) => {
            let books = |(shelf, word): (usize, &String)| Ok(Book { shelf: shelf as u32, pages: word.parse()? });
            let books = numbers.iter().enumerate().map(books).collect::<Result<Vec<_>, std::num::ParseIntError>>()?;
            let _domain = Domain::join("visitor")?;
            let library = client()?;
            // By reference: however many books there are, the call is one cache line.
            let books = HeapSlice::copied(library.calls().heap(), &books)?;
            println!("{} pages", library.pages(&books)?);
            println!("{} books in the library", library.all()?.len());
        }
        _ => return Err("typed_calls serve, typed_calls find TITLE, or typed_calls pages NUMBER...".into()),
    }
    Ok(())
}

fn client() -> partywall::Result<LibraryClient> {
    Ok(LibraryClient::new(CallClient::connect("web:library")?))
}

fn serve(domain: &Domain) -> partywall::Result<()> {
    let library =
        SmallLibrary(vec![("Emma", Book { shelf: 7, pages: 474 }), ("Persuasion", Book { shelf: 7, pages: 249 })]);
    let _server = library.add_to(CallServer::builder()).bind(domain, "library")?;
    loop {
        std::thread::park();
    }
}
