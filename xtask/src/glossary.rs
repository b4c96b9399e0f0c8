//! `cargo xtask glossary`: one word for each idea, in the types as in docs/glossary.md.
//!
//! The glossary's rows are sorted, and the types that it names exist. A type that other modules can name has a name that no other
//! such type of the workspace has. Names that stand for several things today are in [`COLLIDING`], which can only get shorter.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use syn::{Attribute, Item, Visibility};

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

/// Names that stand for several things today. Rename all but one type, to say what each is, and take the name out.
const COLLIDING: &str = include_str!("glossary/colliding.txt");

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let files: Vec<File> = tree.files("rs")?.into_iter().filter(|file| is_source(&file.path)).collect();
    let types = types_of(&files);
    let colliding: BTreeSet<&str> = COLLIDING.split_whitespace().collect();
    let mut findings = judge_types(&types, &colliding);
    let glossary = tree.read(GLOSSARY)?;
    findings.extend(judge_glossary(&glossary.text, &types));
    let notes =
        vec![format!("{} names still stand for several things: xtask/src/glossary/colliding.txt", colliding.len())];
    Ok(Report { check: "glossary", looked_at: format!("{} types", types.len()), notes, findings })
}

fn is_source(path: &str) -> bool {
    path.starts_with("crates/") && path.contains("/src/") && !path.ends_with("/tests.rs") && !path.contains("/tests/")
}

/// Where each name of a type is defined.
fn types_of(files: &[File]) -> BTreeMap<String, BTreeSet<String>> {
    let mut types = BTreeMap::new();
    for file in files {
        let items = syn::parse_file(&file.text).map(|parsed| parsed.items).unwrap_or_default();
        take(&items, &file.path, &mut types);
    }
    types
}

fn take(items: &[Item], path: &str, types: &mut BTreeMap<String, BTreeSet<String>>) {
    for item in items {
        let (name, vis) = match item {
            Item::Struct(item) => (&item.ident, &item.vis),
            Item::Enum(item) => (&item.ident, &item.vis),
            Item::Trait(item) => (&item.ident, &item.vis),
            Item::Mod(module) if !is_for_tests(&module.attrs) => {
                let items = module.content.as_ref().map_or(&[][..], |(_, items)| items);
                take(items, path, types);
                continue;
            }
            _ => continue,
        };
        if !matches!(vis, Visibility::Inherited) {
            types.entry(name.to_string()).or_default().insert(path.to_owned());
        }
    }
}

fn is_for_tests(attrs: &[Attribute]) -> bool {
    let is_test = |attr: &Attribute| attr.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"));
    attrs.iter().any(|attr| attr.path().is_ident("cfg") && is_test(attr))
}

fn judge_types(types: &BTreeMap<String, BTreeSet<String>>, colliding: &BTreeSet<&str>) -> Vec<Finding> {
    let is_listed = |name: &str| colliding.contains(name) || SHARED.iter().any(|(shared, _)| *shared == name);
    let twice = |name: &str| types.get(name).is_some_and(|places| places.len() > 1);
    let new = types.iter().filter(|(name, places)| places.len() > 1 && !is_listed(name)).map(|(name, places)| {
        let places: Vec<&str> = places.iter().map(String::as_str).collect();
        Finding::new(places[0], format!("`{name}` names several types: {}. Say what each is", places.join(", ")))
    });
    let stale = colliding.iter().filter(|name| !twice(name)).map(|name| {
        Finding::new("xtask/src/glossary/colliding.txt", format!("`{name}` names one type at most now: take it out"))
    });
    new.chain(stale).collect()
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
    fn name_of_two_types_is_found_unless_listed() {
        let two = types(&["pub struct Place;", "pub(crate) enum Place {}"]);
        assert_eq!(judge_types(&two, &BTreeSet::new()).len(), 1);
        assert_eq!(judge_types(&two, &BTreeSet::from(["Place"])), vec![]);
    }

    #[test]
    fn listed_name_that_no_longer_collides_is_found() {
        let one = types(&["pub struct Place;"]);
        assert_eq!(judge_types(&one, &BTreeSet::from(["Place"])).len(), 1);
    }

    #[test]
    fn private_and_test_types_may_share_a_name() {
        let private = types(&["struct Place;", "pub struct Place;", "#[cfg(test)]\nmod tests { pub struct Place; }"]);
        assert_eq!(judge_types(&private, &BTreeSet::new()), vec![]);
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
