//! The macro that declares typed methods.

/// Declares a service: a trait that a server implements, and a client with a function for each method.
///
/// The types of arguments and results are those of [`Declared`](crate::rpc::Declared) and [`MethodResult`](crate::rpc::MethodResult). The server's
/// methods get the call, and what they see of each argument, and return a `Result` with [`CallError`](crate::rpc::CallError). An
/// application's own error becomes one by [`CallError::application`](crate::rpc::CallError::application), or by `?` and a `From` for it.
///
/// ```
/// use partywall::rpc::{CallClient, CallError, CallServer, IncomingCall, PeerSlice, PlainData};
/// use zerocopy::{Immutable, IntoBytes, TryFromBytes};
///
/// #[derive(Debug, Clone, Copy, PartialEq, TryFromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// pub struct Book {
///     shelf: u32,
///     number: u32,
/// }
/// impl PlainData for Book {}
///
/// partywall::service! {
///     /// A library, as seen from another process.
///     pub trait Library, client LibraryClient {
///         /// Where a book is.
///         fn find(title: &str) -> Option<Book>;
///         /// The number of pages of some books.
///         fn pages(books: &[Book]) -> u64;
///         fn burn(book: Book);
///     }
/// }
///
/// struct Small;
/// impl Library for Small {
///     fn find(&self, _: &IncomingCall<'_>, title: String) -> Result<Option<Book>, CallError> {
///         Ok((title == "Emma").then_some(Book { shelf: 7, number: 1 }))
///     }
///     fn pages(&self, _: &IncomingCall<'_>, books: PeerSlice<Book>) -> Result<u64, CallError> {
///         books.iter().map(|book| Ok(u64::from(book?.number) * 300)).sum()
///     }
///     fn burn(&self, call: &IncomingCall<'_>, _: Book) -> Result<(), CallError> {
///         Err(CallError::application(451, format!("{} may burn no books", call.peer().name)))
///     }
/// }
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = Small.add_to(CallServer::builder()).bind(&web, "library")?;
/// let library = LibraryClient::new(CallClient::connect("web:library")?);
/// let book = library.find("Emma")?.ok_or("no such book")?;
/// assert_eq!(library.pages(&[book, book])?, 600);
/// assert!(matches!(library.burn(book), Err(CallError::Application { code: 451, .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// On the wire a method has the number of `Trait.method`, and its arguments lie one after the other without padding, so programs in C and
/// Python can call it: `docs/rpc.md` has the layout.
///
/// `client.within(duration)` is the same client with a limit for each call. With the feature `tokio`, the client also works over an
/// `AsyncCallClient`, with functions to be awaited, and `trait Library, tasks LibraryTasks, client LibraryClient` declares a second trait
/// for a server whose methods are futures: see `partywall::asynchronous`.
#[macro_export]
macro_rules! service {
    (
        $(#[$meta:meta])*
        $vis:vis trait $service:ident $(, tasks $tasks:ident)?, client $client:ident {
            $(
                $(#[$method_meta:meta])*
                fn $method:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;
            )*
        }
    ) => {
        $(#[$meta])*
        $vis trait $service: Send + Sync + 'static {
            $(
                $(#[$method_meta])*
                fn $method(
                    &self,
                    call: &$crate::rpc::IncomingCall<'_>,
                    $($arg: <fn($type) as $crate::rpc::Declared>::Seen,)*
                ) -> ::std::result::Result<$crate::service!(@result $($result)?), $crate::rpc::CallError>;
            )*

            /// Adds the methods of this service to a server.
            fn add_to(self, builder: $crate::rpc::CallServerBuilder) -> $crate::rpc::CallServerBuilder
            where
                Self: Sized,
            {
                let service = ::std::sync::Arc::new(self);
                $(
                    let this = ::std::sync::Arc::clone(&service);
                    let builder = builder.method(
                        concat!(stringify!($service), ".", stringify!($method)),
                        move |call| {
                            #[allow(unused_mut, reason = "a method without arguments reads none")]
                            let mut frame = $crate::rpc::ValueReader::of_call(call);
                            $(let $arg = <fn($type) as $crate::rpc::Declared>::see(&mut frame)?;)*
                            frame.finish()?;
                            Self::$method(&this, call, $($arg),*).map($crate::rpc::MethodResult::give)
                        },
                    );
                )*
                builder
            }
        }

        $crate::service!(@client
            $(#[$meta])*
            $vis $service $client
            $($method($($arg: $type),*) -> ($crate::service!(@result $($result)?)), $(#[$method_meta])*;)*
        );

        $crate::service_of_tasks! {
            ($(#[$meta])*) $vis $service ($($tasks)?) $client
            $(fn $method($($arg: $type),*) -> ($crate::service!(@result $($result)?)), ($(#[$method_meta])*);)*
        }
    };
    (@result) => { () };
    (@result $result:ty) => { $result };
    (@client
        $(#[$meta:meta])*
        $vis:vis $service:ident $client:ident
        $($method:ident($($arg:ident: $type:ty),*) -> ($result:ty), $(#[$method_meta:meta])*;)*
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        $vis struct $client<C = $crate::rpc::CallClient> {
            calls: C,
            longest: ::std::option::Option<::std::time::Duration>,
        }

        #[allow(dead_code, reason = "a program uses a part of a client")]
        impl<C> $client<C> {
            /// The client of this connection.
            $vis fn new(calls: C) -> Self {
                Self { calls, longest: ::std::option::Option::None }
            }

            /// The connection, with this side's heap.
            $vis fn calls(&self) -> &C {
                &self.calls
            }

            /// The same client; each call may take no longer than this.
            $vis fn within(&self, longest: ::std::time::Duration) -> Self
            where
                C: ::std::clone::Clone,
            {
                Self { calls: self.calls.clone(), longest: ::std::option::Option::Some(longest) }
            }
        }

        #[allow(dead_code, reason = "a program uses a part of a client")]
        impl $client<$crate::rpc::CallClient> {
            $(
                $(#[$method_meta])*
                $vis fn $method(
                    &self,
                    $($arg: $type),*
                ) -> ::std::result::Result<<$result as $crate::rpc::MethodResult>::Received, $crate::rpc::CallError> {
                    const METHOD: $crate::rpc::Method =
                        $crate::rpc::Method::named(concat!(stringify!($service), ".", stringify!($method)));
                    #[allow(unused_mut, reason = "a method without arguments passes none")]
                    let mut frame = $crate::rpc::ValueWriter::default();
                    $($crate::rpc::Argument::pass(&$arg, &mut frame);)*
                    let reply = match self.longest {
                        ::std::option::Option::Some(longest) => self.calls.call_within(longest, METHOD, frame.bytes())?,
                        ::std::option::Option::None => self.calls.call(METHOD, frame.bytes())?,
                    };
                    <$result as $crate::rpc::MethodResult>::receive(reply)
                }
            )*
        }
    };
}
