//! The binary interface: what the library exports, what the header declares and what Rust defines are the same, and as committed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use object::{Object, ObjectSymbol};
use partywall_capi::failure::ErrorCode;
use partywall_capi::options::RawOptions;
use partywall_capi::peer::RawPeer;
use partywall_capi::rpc::RawRpcMethod;
use std::fmt::Write as _;
use std::mem::offset_of;

/// A structure that C and Rust share: its name in C, its size, and its fields with their offsets.
type Structure = (&'static str, usize, Vec<(&'static str, usize)>);

macro_rules! structure {
    ($c:literal, $rust:ident { $($field:ident),* }) => {
        ($c, size_of::<$rust>(), vec![$((stringify!($field), offset_of!($rust, $field))),*])
    };
}

fn structures() -> [Structure; 3] {
    [
        structure!(
            "pw_options",
            RawOptions {
                size,
                spin_us,
                ring_initial,
                ring_max,
                max_peer_ring,
                backlog,
                one_way,
                huge_pages,
                sleeps_often
            }
        ),
        structure!("pw_rpc_method", RawRpcMethod { name, function, context, flags }),
        structure!("pw_peer", RawPeer { size, domain_id, domain, service, epoch, uid, pid, certain_uid }),
    ]
}

/// `TimedOut` -> `PW_TIMED_OUT`.
fn code_in_c(code: ErrorCode) -> String {
    let mut name = String::from("PW");
    for letter in format!("{code:?}").chars() {
        if letter.is_ascii_uppercase() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

fn exported_symbols() -> Vec<String> {
    let bytes = std::fs::read(shared_library()).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let defined = file.dynamic_symbols().filter(|symbol| symbol.is_definition() && symbol.is_global());
    let mut names: Vec<String> = defined.map(|symbol| symbol.name().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// The interface as text, a line for each thing that a program is compiled against.
fn interface() -> String {
    let mut text = String::new();
    for symbol in exported_symbols() {
        writeln!(text, "function {symbol}").unwrap();
    }
    for (name, size, fields) in structures() {
        writeln!(text, "structure {name} {size}").unwrap();
        for (field, offset) in fields {
            writeln!(text, "  {offset} {field}").unwrap();
        }
    }
    for code in ErrorCode::ALL {
        writeln!(text, "code {} {}", code_in_c(code), code as i32).unwrap();
    }
    text
}

/// The type of C for a type of Rust, as the sources of this crate write it.
fn type_in_c(ty: &syn::Type) -> String {
    match ty {
        syn::Type::Ptr(pointer) if matches!(pointer.mutability, syn::PointerMutability::Const(_)) => {
            // `*const *const T` is `const T *const *`; the library has only pointers to values as constants.
            format!("{} const *", type_in_c(&pointer.elem))
        }
        syn::Type::Ptr(pointer) => format!("{} *", type_in_c(&pointer.elem)),
        syn::Type::Tuple(tuple) if tuple.elems.is_empty() => "void".to_owned(),
        syn::Type::Path(path) => {
            let name = path.path.segments.last().unwrap().ident.to_string();
            match name.as_str() {
                "c_char" => "char".to_owned(),
                "c_int" => "int".to_owned(),
                "c_void" => "void".to_owned(),
                "usize" => "size_t".to_owned(),
                "isize" => "ptrdiff_t".to_owned(),
                "u64" => "uint64_t".to_owned(),
                _ => {
                    let stem = name.strip_suffix("Handle").or_else(|| name.strip_prefix("Raw"));
                    let stem = stem.unwrap_or_else(|| panic!("{name} is no type that C has"));
                    let mut c = String::from("pw");
                    for letter in stem.chars() {
                        if letter.is_ascii_uppercase() {
                            c.push('_');
                        }
                        c.push(letter.to_ascii_lowercase());
                    }
                    c
                }
            }
        }
        _ => panic!("a type that C does not have"),
    }
}

fn prototype(signature: &syn::Signature) -> String {
    let arguments: Vec<String> = signature
        .inputs
        .iter()
        .map(|argument| match argument {
            syn::FnArg::Typed(typed) => type_in_c(&typed.ty),
            syn::FnArg::Receiver(_) => panic!("an exported method"),
        })
        .collect();
    let result = match &signature.output {
        syn::ReturnType::Default => "void".to_owned(),
        syn::ReturnType::Type(_, ty) => type_in_c(ty),
    };
    let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
    format!("{result} {}({arguments});", signature.ident)
}

/// A prototype for each function that the sources export, by its Rust signature.
fn prototypes() -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(crate_folder().join("src")).unwrap() {
        let file = syn::parse_file(&std::fs::read_to_string(entry.unwrap().path()).unwrap()).unwrap();
        let mut items = Vec::new();
        for item in file.items {
            match item {
                syn::Item::Macro(call) if call.mac.path.is_ident("exported") => {
                    items.extend(syn::parse2::<syn::File>(call.mac.tokens).unwrap().items);
                }
                syn::Item::Fn(function)
                    if function.sig.abi.is_some() && function.sig.ident.to_string().starts_with("pw_") =>
                {
                    items.push(syn::Item::Fn(function));
                }
                _ => {}
            }
        }
        found.extend(items.iter().map(|item| match item {
            syn::Item::Fn(function) => prototype(&function.sig),
            _ => panic!("`exported!` holds functions only"),
        }));
    }
    found
}

#[test]
fn interface_is_the_committed_one() {
    let path = crate_folder().join("abi/partywall.abi");
    let now = interface();
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        now == committed,
        "{} differs. Programs that were compiled before may break: add functions and fields at the end only, or raise the number in \
         the library's SONAME (build.rs). The interface is now:\n{now}",
        path.display()
    );
}

#[test]
fn header_matches_rust_signatures_layouts_and_codes() {
    let declared = prototypes();
    let named: Vec<&str> = declared.iter().map(|p| &p[p.find("pw_").unwrap()..]).collect();
    // The compiler accepts a second declaration of a function only if it is the same.
    let mut source = String::from("#include <partywall_rpc_back.h>\n");
    for prototype in &declared {
        writeln!(source, "{prototype}").unwrap();
    }
    for (name, size, fields) in structures() {
        writeln!(source, "_Static_assert(sizeof({name}) == {size}, \"{name}\");").unwrap();
        for (field, offset) in fields {
            writeln!(source, "_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");").unwrap();
        }
    }
    for code in ErrorCode::ALL {
        let c = code_in_c(code);
        writeln!(source, "_Static_assert({c} == {}, \"{c}\");", code as i32).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("check.c");
    std::fs::write(&path, source).unwrap();
    compile(GCC, &path, &["-c"], &folder.path().join("check.o"));

    // And each exported function has a prototype in the header, not only in the file above.
    let header = ["partywall.h", "partywall_rpc.h", "partywall_rpc_back.h"]
        .map(|name| std::fs::read_to_string(crate_folder().join("include").join(name)).unwrap());
    let symbols = exported_symbols();
    let of_calls = symbols.iter().filter(|symbol| header[1].contains(&format!("{symbol}(")));
    assert_eq!(of_calls.count(), 8, "the header of calls stays small");
    let header = header.concat();
    assert_eq!(symbols.len(), named.len(), "{symbols:?} {named:?}");
    for symbol in symbols {
        let declaration = header.lines().any(|line| line.ends_with(';') && line.contains(&format!("{symbol}(")));
        assert!(declaration, "{symbol} is not in the header");
    }
}

#[test]
fn every_function_has_a_man_page() {
    let mut pages = String::new();
    for entry in std::fs::read_dir(crate_folder().join("man")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        // The line after `.SH NAME` lists what a page describes; `make install` makes a link for each.
        pages.push_str(text.lines().skip_while(|line| *line != ".SH NAME").nth(1).unwrap());
        pages.push('\n');
    }
    for symbol in exported_symbols() {
        assert!(pages.split([',', ' ', '\n']).any(|word| word == symbol), "no man page describes {symbol}");
    }
}
