//! `cargo xtask glossary`: one word for each idea, in the types as in docs/glossary.md.
//!
//! The glossary's rows are sorted, and the types that it names exist. A type has a name that no other type of the workspace has, whether
//! other modules can name it or not, and whether it is written out or made by a macro. Types of tests and types inside functions are exempt.

mod made;

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use syn::punctuated::Punctuated;
use syn::{Attribute, Item, Meta, Token};

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::source::line_of;
use crate::tree::{File, Tree};

const GLOSSARY: &str = "docs/glossary.md";

/// Names that several types may have, and why.
const SHARED: &[(&str, &str)] = &[
    ("Args", "the options of one command of a program: every command has its own, in its module"),
    ("Cli", "the options of one program"),
    ("Command", "the commands of one program"),
];

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let files: Vec<File> = tree.files("rs")?.into_iter().filter(|file| is_source(&file.path)).collect();
    let types = types_of(&files);
    let mut findings = judge_types(&types);
    let glossary = tree.read(GLOSSARY)?;
    findings.extend(judge_glossary(&glossary.text, &types));
    Ok(Report { check: "glossary", looked_at: format!("{} types", types.len()), notes: Vec::new(), findings })
}

fn is_source(path: &str) -> bool {
    path.starts_with("crates/") && path.contains("/src/") && !path.ends_with("/tests.rs") && !path.contains("/tests/")
}

/// Where each name of a type is defined.
fn types_of(files: &[File]) -> BTreeMap<String, BTreeSet<String>> {
    let parsed: Vec<(&str, Vec<Item>)> = files
        .iter()
        .map(|file| (file.path.as_str(), syn::parse_file(&file.text).map(|parsed| parsed.items).unwrap_or_default()))
        .collect();
    let mut makers = BTreeSet::new();
    for (_, items) in &parsed {
        for_each_item(items, &mut |item| makers.extend(made::maker(item)));
    }
    let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, items) in &parsed {
        for_each_item(items, &mut |item| {
            for name in names(item, &makers) {
                types.entry(name).or_default().insert((*path).to_owned());
            }
        });
    }
    types
}

fn names(item: &Item, makers: &BTreeSet<String>) -> Vec<String> {
    match item {
        Item::Struct(item) => vec![item.ident.to_string()],
        Item::Enum(item) => vec![item.ident.to_string()],
        Item::Union(item) => vec![item.ident.to_string()],
        Item::Trait(item) => vec![item.ident.to_string()],
        Item::Macro(item) => made::types(item, makers),
        _ => Vec::new(),
    }
}

/// Visits the items of a file and of its inline modules, except those of tests.
fn for_each_item(items: &[Item], visit: &mut impl FnMut(&Item)) {
    for item in items {
        match item {
            Item::Mod(module) if !is_for_tests(&module.attrs) => {
                for_each_item(module.content.as_ref().map_or(&[], |(_, items)| items), visit);
            }
            item => visit(item),
        }
    }
}

/// Whether an item is there for tests alone: `cfg(test)`, or `cfg(all(test, ..))`.
fn is_for_tests(attrs: &[Attribute]) -> bool {
    let names_test = |meta: &Meta| match meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => {
            let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
            parts.is_ok_and(|parts| parts.iter().any(|part| part.path().is_ident("test")))
        }
        _ => false,
    };
    attrs.iter().any(|attr| attr.path().is_ident("cfg") && attr.parse_args().is_ok_and(|meta| names_test(&meta)))
}

fn judge_types(types: &BTreeMap<String, BTreeSet<String>>) -> Vec<Finding> {
    let is_shared = |name: &str| SHARED.iter().any(|(shared, _)| *shared == name);
    let collisions = types.iter().filter(|(name, places)| places.len() > 1 && !is_shared(name));
    collisions
        .map(|(name, places)| {
            let places: Vec<&str> = places.iter().map(String::as_str).collect();
            Finding::new(places[0], format!("`{name}` names several types: {}. Say what each is", places.join(", ")))
        })
        .collect()
}

fn judge_glossary(text: &str, types: &BTreeMap<String, BTreeSet<String>>) -> Vec<Finding> {
    let row = Regex::new(r"(?m)^\| ([a-z][^|]*?) \| [^|]+ \| ([^|]*) \|$").expect("a constant pattern");
    let name = Regex::new(r"`(?:\w+::)*([A-Z]\w*)`").expect("a constant pattern");
    let mut findings = Vec::new();
    let mut last = String::new();
    for found in row.captures_iter(text) {
        let place = format!("{GLOSSARY}:{}", line_of(text, found.get(0).map_or(0, |whole| whole.start())));
        let word = found[1].to_owned();
        if word <= last {
            findings
                .push(Finding::new(&place, format!("`{word}` comes after `{last}`: sort the rows, one for each word")));
        }
        for of in name.captures_iter(&found[2]).filter(|of| !types.contains_key(&of[1])) {
            findings.push(Finding::new(&place, format!("there is no type `{}`", &of[1])));
        }
        last = word;
    }
    if last.is_empty() {
        findings.push(Finding::new(GLOSSARY, "has no rows"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(sources: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
        let file = |(n, text): (usize, &&str)| File { path: format!("crates/a/src/{n}.rs"), text: (*text).to_owned() };
        types_of(&sources.iter().enumerate().map(file).collect::<Vec<_>>())
    }

    #[test]
    fn name_of_two_types_is_found_unless_shared() {
        assert_eq!(judge_types(&types(&["pub struct Place;", "pub(crate) enum Place {}"])).len(), 1);
        assert_eq!(judge_types(&types(&["struct Place;", "mod inner { union Place { a: u8 } }"])).len(), 1);
        assert_eq!(judge_types(&types(&["struct Args;", "struct Args;"])), vec![]);
    }

    #[test]
    fn type_of_tests_may_share_a_name() {
        let tests = "#[cfg(all(test, not(loom)))]\nmod tests { pub struct Place; }";
        let shared = types(&["pub struct Place;", tests, "#[cfg(test)]\nmod tests { pub struct Place; }"]);
        assert_eq!(judge_types(&shared), vec![]);
    }

    #[test]
    fn type_made_by_macro_collides() {
        let written_out = "wrap! { pub struct Place { a: u8 } }";
        assert_eq!(judge_types(&types(&["struct Place;", written_out])).len(), 1);
        let maker = "macro_rules! number { ($(#[$meta:meta])* $name:ident: $repr:ty {}) => { pub enum $name {} } }";
        let made = "a::number! { /// A place.\n Place: u8 {} }";
        assert_eq!(judge_types(&types(&["struct Place;", maker, made])).len(), 1);
        let nested = "macro_rules! places { ($a:ident) => { number! { /// It.\n Place: u8 {} } } }";
        assert_eq!(judge_types(&types(&["struct Place;", maker, nested])).len(), 1);
        assert_eq!(judge_types(&types(&["struct Place;", maker, "other! { Place: u8 {} }"])), vec![]);
    }

    #[test]
    fn glossary_names_types_that_exist_in_order() {
        let one = types(&["pub struct Ring;"]);
        let row = |word: &str, of: &str| format!("| {word} | A queue. | {of} |\n");
        assert_eq!(judge_glossary(&format!("{}{}", row("link", "-"), row("ring", "`a::Ring`")), &one), vec![]);
        assert_eq!(judge_glossary(&format!("{}{}", row("ring", "`a::Rings`"), row("link", "-")), &one).len(), 2);
        assert_eq!(judge_glossary("", &one).len(), 1);
    }
}
