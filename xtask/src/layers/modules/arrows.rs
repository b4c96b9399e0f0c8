//! The uses between the top-level modules of a crate, and between the modules of each of them.
//!
//! Paths that begin with `crate`, `self` or `super` are followed, in `use` items, in code and in the arguments of macros.
//! A name that lib.rs re-exports counts as the module it comes from. Items under `#[cfg(test)]` are left out: a test may use any module.
//! So are binaries beside the library.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Macro, UseTree};

use crate::error::Error;
use crate::tree::File;

/// The crate's root as the end of an arrow: an item that lib.rs defines itself.
pub(super) const ROOT: &str = "lib.rs";

/// A use of one module by another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Arrow {
    pub(super) from: String,
    pub(super) to: String,
    /// `file:line`
    pub(super) place: String,
}

/// The modules of a crate, and their uses.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) modules: BTreeSet<String>,
    pub(super) arrows: Vec<Arrow>,
}

/// The sources of a crate's library.
pub(super) struct Sources<'a>(Vec<(&'a File, Vec<String>, syn::File)>);

/// Reads the sources of the library in `crates/<krate>`.
pub(super) fn read<'a>(krate: &str, files: &'a [File]) -> Result<Sources<'a>, Error> {
    let folder = format!("crates/{krate}/src/");
    let mut sources = Vec::new();
    for file in files {
        let Some(path) = file.path.strip_prefix(&folder) else { continue };
        if path == "main.rs" || path.starts_with("bin/") {
            continue;
        }
        let parsed = syn::parse_file(&file.text).map_err(|source| Error::Rust {
            path: file.path.clone(),
            line: source.span().start().line,
            source,
        })?;
        sources.push((file, module_path(path), parsed));
    }
    Ok(Sources(sources))
}

impl Sources<'_> {
    /// The modules that have modules in separate files, and the crate's root, which is empty.
    pub(super) fn parents(&self) -> BTreeSet<&[String]> {
        self.0.iter().filter_map(|(_, path, _)| path.split_last().map(|(_, parent)| parent)).collect()
    }

    /// The modules directly below `parent`, and the uses between them. An item of the parent itself is [`ROOT`].
    pub(super) fn arrows(&self, parent: &[String]) -> Found {
        let root = self.0.iter().find(|(_, path, _)| path == parent).map(|(_, _, parsed)| Root::of(&parsed.items));
        let root = root.unwrap_or_default();
        let tests: Vec<Vec<String>> =
            self.0.iter().flat_map(|(_, path, parsed)| test_modules(path, &parsed.items)).collect();
        let mut found = Found { modules: root.modules.clone(), arrows: Vec::new() };
        for (file, path, parsed) in &self.0 {
            // The parent is above all modules, and a module that it does not have is one of tests only.
            let Some(from) = path.strip_prefix(parent).and_then(<[String]>::first) else { continue };
            if !root.modules.contains(from) || tests.iter().any(|test| path.starts_with(test)) {
                continue;
            }
            let mut seen = Paths { here: path.clone(), found: Vec::new() };
            seen.visit_file(parsed);
            for (target, line) in seen.found {
                let Some(to) = target.strip_prefix(parent).and_then(|target| root.resolve(target)) else { continue };
                if to != *from {
                    found.arrows.push(Arrow { from: from.clone(), to, place: format!("{}:{line}", file.path) });
                }
            }
        }
        found
    }
}

/// `conn/tx.rs` -> `conn`, `tx`; `conn/mod.rs` -> `conn`; `lib.rs` -> nothing.
fn module_path(file: &str) -> Vec<String> {
    let mut parts: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
        parts.pop();
    }
    parts
}

/// The declarations of lib.rs.
#[derive(Debug, Default)]
struct Root {
    modules: BTreeSet<String>,
    /// Names that it re-exports, and the module that each comes from.
    exports: BTreeMap<String, String>,
}

impl Root {
    fn of(items: &[Item]) -> Self {
        let mut root = Root::default();
        for item in items {
            match item {
                Item::Mod(module) if !is_test(&module.attrs) => {
                    root.modules.insert(module.ident.to_string());
                }
                Item::Use(item) => {
                    let mut names = Vec::new();
                    leaves(&item.tree, &mut Vec::new(), &mut names);
                    for path in names {
                        let path = if path.first().is_some_and(|first| first == "crate" || first == "self") {
                            path[1..].to_vec()
                        } else {
                            path
                        };
                        if let [module, .., name] = path.as_slice() {
                            root.exports.insert(name.clone(), module.clone());
                        }
                    }
                }
                _ => {}
            }
        }
        root.exports.retain(|_, module| root.modules.contains(module));
        root
    }

    /// The end of an arrow to `path`, which begins at the crate's root.
    fn resolve(&self, path: &[String]) -> Option<String> {
        let first = path.first()?;
        if self.modules.contains(first) {
            return Some(first.clone());
        }
        Some(self.exports.get(first).cloned().unwrap_or_else(|| ROOT.to_owned()))
    }
}

/// Every path that a `use` tree names. A rename counts by its new name.
fn leaves(tree: &UseTree, prefix: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    let with = |prefix: &[String], last: &str| [prefix, &[last.to_owned()]].concat();
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            leaves(&path.tree, prefix, all);
            prefix.pop();
        }
        UseTree::Name(name) => all.push(with(prefix, &name.ident.to_string())),
        UseTree::Rename(rename) => all.push(with(prefix, &rename.rename.to_string())),
        UseTree::Glob(_) => all.push(with(prefix, "*")),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, prefix, all)),
    }
}

/// The modules in separate files that a module has for tests only.
fn test_modules(path: &[String], items: &[Item]) -> Vec<Vec<String>> {
    let names = items.iter().filter_map(|item| match item {
        Item::Mod(module) if module.content.is_none() && is_test(&module.attrs) => Some(module.ident.to_string()),
        _ => None,
    });
    names.map(|name| path.iter().cloned().chain([name]).collect()).collect()
}

/// Whether an item is there for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
        attribute.path().is_ident("test") || (attribute.path().is_ident("cfg") && is_test_only(&text))
    })
}

/// `test`, or `all(test, ...)`; not `any(test, ...)`, which is built for others too.
fn is_test_only(condition: &str) -> bool {
    let condition: String = condition.chars().filter(|c| !c.is_whitespace()).collect();
    condition == "test"
        || condition
            .strip_prefix("all(")
            .is_some_and(|rest| rest.trim_end_matches(')').split(',').any(|part| part == "test"))
}

/// Collects paths from the crate's root, with the line of each.
struct Paths {
    here: Vec<String>,
    found: Vec<(Vec<String>, usize)>,
}

impl Paths {
    fn add(&mut self, names: &[String], line: usize) {
        let mut at = self.here.clone();
        let mut rest = names;
        match rest.first().map(String::as_str) {
            Some("crate") => at.clear(),
            Some("self") => {}
            Some("super") => {
                while rest.first().is_some_and(|name| name == "super") {
                    at.pop();
                    rest = &rest[1..];
                }
                at.extend(rest.iter().cloned());
                return self.found.push((at, line));
            }
            // A name of this module's own, of another crate, or one that a `use` brings, which is seen there.
            _ => return,
        }
        at.extend(rest[1..].iter().cloned());
        self.found.push((at, line));
    }

    /// Paths among the tokens of a macro, whose grammar is its own.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) => {
                    let line = first.span().start().line;
                    let mut names = vec![first.to_string()];
                    while is_colon(at) && is_colon(at + 1) {
                        let Some(TokenTree::Ident(next)) = tokens.get(at + 2) else { break };
                        names.push(next.to_string());
                        at += 3;
                    }
                    if names.len() > 1 {
                        self.add(&names, line);
                    }
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Const(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Enum(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.here.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.here.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let mut names = Vec::new();
        leaves(&item.tree, &mut Vec::new(), &mut names);
        let line = item.span().start().line;
        for path in names {
            self.add(&path, line);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 {
            self.add(&names, path.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // `pub(in crate::conn)` uses nothing.
    }

    fn visit_macro(&mut self, item: &'ast Macro) {
        self.visit_path(&item.path);
        self.tokens(item.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: format!("crates/one/src/{path}"), text: text.to_owned() }
    }

    fn arrows(text: &str) -> Vec<String> {
        let root = "mod a; mod b; mod c; pub use b::{Thing, sub::Deep as Renamed}; pub fn own() {}";
        let files = [file("lib.rs", root), file("a/inner.rs", text), file("main.rs", "use crate::b;")];
        let found = read("one", &files).expect("the fixtures parse").arrows(&[]);
        found.arrows.into_iter().map(|arrow| format!("{}->{}", arrow.from, arrow.to)).collect()
    }

    #[test]
    fn path_in_use_code_or_macro_is_an_arrow() {
        for text in [
            "use crate::b::X;",
            "use super::super::b;",
            "use crate::{b::{X, Y as Z}};",
            "fn f() { crate::b::g(); }",
            "fn f(x: crate::b::X) {}",
            "fn f() { assert!(crate::b::g() == 1); }",
            "mod deep { use super::super::super::b; }",
            "#[cfg(any(test, fuzzing))] use crate::b;",
        ] {
            assert!(
                !arrows(text).is_empty() && arrows(text).iter().all(|arrow| arrow == "a->b"),
                "{text}: {:?}",
                arrows(text)
            );
        }
    }

    #[test]
    fn arrows_between_modules_of_a_module_are_found() {
        let files = [
            file("lib.rs", "mod a; mod d;"),
            file("a/mod.rs", "mod b; mod c; pub use c::Thing; struct Own;"),
            file("a/b.rs", "use super::Thing; use super::Own; use crate::d;"),
            file("a/c/deep.rs", "use super::super::b;"),
            file("d.rs", "use crate::a::b;"),
        ];
        let sources = read("one", &files).expect("the fixtures parse");
        let inner = ["a".to_owned()];
        assert!(sources.parents().contains(&inner[..]));
        let found = sources.arrows(&inner).arrows.into_iter();
        let found: Vec<_> = found.map(|arrow| format!("{}->{}", arrow.from, arrow.to)).collect();
        assert_eq!(found, ["b->c", "b->lib.rs", "c->b"]);
    }

    #[test]
    fn re_export_counts_as_its_module() {
        assert_eq!(arrows("use crate::Thing;"), ["a->b"]);
        assert_eq!(arrows("use crate::Renamed;"), ["a->b"]);
        assert_eq!(arrows("fn f() { crate::own() }"), ["a->lib.rs"]);
    }

    #[test]
    fn own_module_other_crates_and_tests_are_no_arrows() {
        for text in [
            "use crate::a::X; use super::Y; use self::z; use std::b::C; fn f() { b::g() }",
            "#[cfg(test)] mod tests { use crate::b; }",
            "#[cfg(all(test, not(loom)))] mod tests { use crate::b; }",
            "#[test] fn t() { crate::b::g() }",
            "pub(in crate::b) fn f() {}",
        ] {
            assert_eq!(arrows(text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn module_of_tests_in_a_separate_file_has_no_arrows() {
        for (attribute, arrows) in [("#[cfg(test)]", 0), ("", 1)] {
            let declares = format!("{attribute} mod tests;");
            let uses = file("a/tests/deep.rs", "use crate::b;");
            let files = [file("lib.rs", "mod a; mod b;"), file("a/mod.rs", &declares), uses];
            assert_eq!(read("one", &files).expect("it parses").arrows(&[]).arrows.len(), arrows, "{attribute}");
        }
    }

    #[test]
    fn arrow_names_file_and_line() {
        let files = [file("lib.rs", "mod a; mod b;"), file("a.rs", "\nuse crate::b;")];
        assert_eq!(read("one", &files).expect("it parses").arrows(&[]).arrows[0].place, "crates/one/src/a.rs:2");
    }
}
