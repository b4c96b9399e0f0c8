//! `cargo xtask examples`: every public item of the library has an example.
//!
//! A type, function or module that a program can name has an example in its documentation. A method has one too, or is called in another
//! example of its type or one that names its type, in a line that readers see. Items that the library re-exports from other crates are
//! shown at the re-export, by their names. An example is compiled and run
//! by `cargo test --doc`; those of [`NOT_RUN`] only compile, and each says why.

use std::collections::BTreeMap;

use regex::Regex;
use syn::{Attribute, Expr, ImplItem, Item, Lit, Meta, Type, UseTree, Visibility};

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::tree::{File, Tree};

/// The crate that is held to this: what programs use.
const LIBRARY: &str = "crates/partywall/src/";

/// The items whose examples cannot run, and why.
const NOT_RUN: &[(&str, &str)] = &[("MachineAttached", "it takes a virtual machine")];

/// The examples of one documentation, as far as the check is concerned.
#[derive(Debug, Default)]
struct Examples {
    /// The code that readers see of the examples.
    code: String,
    /// Whether one is not run, or not even compiled.
    not_run: bool,
}

/// A public function or constant of a type.
#[derive(Debug)]
struct Member {
    name: String,
    place: String,
    has_example: bool,
}

/// A type or function.
#[derive(Debug, Default)]
struct Shown {
    place: String,
    has_example: bool,
    members: Vec<Member>,
}

#[derive(Debug, Default)]
struct Library {
    /// Every type and free function of the crate, by name; which of them are public is known when all files are read.
    items: BTreeMap<String, Shown>,
    /// Names that the crate's root, or a public module, exports.
    public: Vec<String>,
    /// The examples of every documentation, and the type that it is of.
    examples: Vec<(String, String)>,
    findings: Vec<Finding>,
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let files: Vec<File> = tree.files("rs")?.into_iter().filter(|file| file.path.starts_with(LIBRARY)).collect();
    let (findings, items) = judge(&files);
    Ok(Report { check: "examples", looked_at: format!("{items} public items"), findings, ..Report::default() })
}

/// The findings, and the number of items.
fn judge(files: &[File]) -> (Vec<Finding>, usize) {
    let mut library = Library::default();
    let public_modules = files.iter().find(|file| file.path.ends_with("/lib.rs")).map(modules_of).unwrap_or_default();
    for file in files {
        let Ok(parsed) = syn::parse_file(&file.text) else {
            library.findings.push(Finding::new(&file.path, "cannot be read"));
            continue;
        };
        let is_module = public_modules.iter().any(|module| file.path.ends_with(&format!("/{module}.rs")));
        let gives_out = is_module || file.path.ends_with("/lib.rs");
        if gives_out && examples(&parsed.attrs).code.is_empty() {
            library.findings.push(Finding::new(&file.path, "this public module has no example at its top"));
        }
        for item in &parsed.items {
            library.take(item, &file.path, gives_out);
        }
    }
    library.judge()
}

fn modules_of(root: &File) -> Vec<String> {
    let items = syn::parse_file(&root.text).map(|file| file.items).unwrap_or_default();
    let public = items.into_iter().filter_map(|item| match item {
        Item::Mod(module) if is_public(&module.vis) => Some(module.ident.to_string()),
        _ => None,
    });
    public.collect()
}

impl Library {
    fn take(&mut self, item: &Item, path: &str, gives_out: bool) {
        let (name, vis, attrs) = match item {
            Item::Struct(item) => (&item.ident, &item.vis, &item.attrs),
            Item::Enum(item) => (&item.ident, &item.vis, &item.attrs),
            Item::Trait(item) => (&item.ident, &item.vis, &item.attrs),
            Item::Type(item) => (&item.ident, &item.vis, &item.attrs),
            Item::Fn(item) => (&item.sig.ident, &item.vis, &item.attrs),
            Item::Const(item) => (&item.ident, &item.vis, &item.attrs),
            Item::Impl(block) if block.trait_.is_none() => return self.take_methods(block, path),
            Item::Use(item) if is_public(&item.vis) => return self.take_use(item, path, gives_out),
            _ => return,
        };
        if !is_public(vis) {
            return;
        }
        let place = place(path, name);
        let found = self.look_at(attrs, &name.to_string(), &place);
        let shown = self.items.entry(name.to_string()).or_default();
        shown.place = place;
        shown.has_example = !found.is_empty();
        if gives_out {
            self.public.push(name.to_string());
        }
    }

    fn take_methods(&mut self, block: &syn::ItemImpl, path: &str) {
        let Type::Path(of) = &*block.self_ty else { return };
        let Some(name) = of.path.segments.last().map(|segment| segment.ident.to_string()) else { return };
        for item in &block.items {
            let (ident, vis, attrs) = match item {
                ImplItem::Fn(item) => (&item.sig.ident, &item.vis, &item.attrs),
                ImplItem::Const(item) => (&item.ident, &item.vis, &item.attrs),
                _ => continue,
            };
            if !is_public(vis) {
                continue;
            }
            let place = place(path, ident);
            let found = self.look_at(attrs, &name, &place);
            let shown = self.items.entry(name.clone()).or_default();
            shown.members.push(Member { name: ident.to_string(), place, has_example: !found.is_empty() });
        }
    }

    /// Names that are exported under a new path. An item of another crate is shown by the documentation of the `use`.
    fn take_use(&mut self, item: &syn::ItemUse, path: &str, gives_out: bool) {
        let mut names = Vec::new();
        leaves(&item.tree, &mut names);
        let is_foreign = matches!(&item.tree, UseTree::Path(tree) if tree.ident.to_string().starts_with("partywall_"));
        if gives_out {
            self.public.extend(names.iter().cloned());
        }
        if !is_foreign {
            return;
        }
        for name in names {
            let place = format!("{path}: {name}");
            let found = self.look_at(&item.attrs, &name, &place);
            let has_example = is_used_in(&name, &found);
            self.items.insert(name, Shown { place, has_example, members: Vec::new() });
        }
    }

    /// The visible code of the examples in a documentation.
    fn look_at(&mut self, attrs: &[Attribute], name: &str, place: &str) -> String {
        let found = examples(attrs);
        if found.not_run && !NOT_RUN.iter().any(|(allowed, _)| *allowed == name) {
            let what = "has an example that is not run: let it run, or list it with a reason in xtask/src/examples.rs";
            self.findings.push(Finding::new(place, what));
        }
        self.examples.push((name.to_owned(), found.code.clone()));
        found.code
    }

    fn judge(mut self) -> (Vec<Finding>, usize) {
        let (mut count, mut missing) = (0, Vec::new());
        let shows = |name: &str, member: &str| {
            let is_of = |(owner, example): &&(String, String)| owner == name || is_word_of(name, example);
            self.examples.iter().filter(is_of).any(|(_, example)| calls(example, member))
        };
        for (name, shown) in self.items.iter().filter(|(name, _)| self.public.contains(name)) {
            count += 1 + shown.members.len();
            if !shown.has_example {
                missing.push(Finding::new(&shown.place, format!("`{name}` has no example")));
            }
            for member in shown.members.iter().filter(|member| !member.has_example && !shows(name, &member.name)) {
                let what =
                    format!("`{name}::{}` has no example, and no example that names `{name}` calls it", member.name);
                missing.push(Finding::new(&member.place, what));
            }
        }
        self.findings.extend(missing);
        (self.findings, count)
    }
}

fn place(path: &str, name: &proc_macro2::Ident) -> String {
    format!("{path}:{}", name.span().start().line)
}

fn is_public(vis: &Visibility) -> bool {
    matches!(vis, Visibility::Public(_))
}

/// The last names of a `use`.
fn leaves(tree: &UseTree, names: &mut Vec<String>) {
    match tree {
        UseTree::Path(path) => leaves(&path.tree, names),
        UseTree::Name(name) => names.push(name.ident.to_string()),
        UseTree::Rename(rename) => names.push(rename.rename.to_string()),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, names)),
        UseTree::Glob(_) => {}
    }
}

/// Whether the code calls a method or function of this name, or names a constant.
fn calls(code: &str, name: &str) -> bool {
    Regex::new(&format!(r"(?:\.|::){name}\b")).is_ok_and(|regex| regex.is_match(code))
}

fn is_word_of(word: &str, text: &str) -> bool {
    Regex::new(&format!(r"\b{word}\b")).is_ok_and(|regex| regex.is_match(text))
}

/// Whether the code does more with a name than import it.
fn is_used_in(name: &str, code: &str) -> bool {
    code.lines().any(|line| !line.trim_start().starts_with("use ") && is_word_of(name, line))
}

/// The code blocks of a documentation that are Rust. Blocks that name another language are no examples.
fn examples(attrs: &[Attribute]) -> Examples {
    let mut found = Examples::default();
    let mut inside = None;
    for line in attrs.iter().filter_map(doc_line).flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()) {
        match (inside, line.trim().strip_prefix("```")) {
            (None, Some(info)) => {
                let skipped = ["no_run", "ignore", "compile_fail"].iter().any(|word| info.contains(word));
                let is_rust = skipped || matches!(info, "" | "rust" | "should_panic");
                found.not_run |= skipped;
                inside = Some(is_rust);
            }
            (Some(_), Some(_)) => inside = None,
            // `# ` hides a line from readers.
            (Some(true), None) if !line.trim_start().starts_with("# ") => {
                found.code.push_str(&line);
                found.code.push('\n');
            }
            _ => {}
        }
    }
    found
}

fn doc_line(attr: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attr.meta else { return None };
    match (&pair.value, pair.path.is_ident("doc")) {
        (Expr::Lit(literal), true) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str = "//! ```\n//! demo::a();\n//! ```\n";

    /// The findings of a crate with a root and one more file.
    fn findings(root: &str, more: &str) -> Vec<String> {
        let file = |path: &str, text: String| File { path: format!("{LIBRARY}{path}"), text };
        let files = [file("lib.rs", format!("{TOP}{root}")), file("more.rs", more.to_owned())];
        judge(&files).0.into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn type_with_an_example_that_calls_its_methods_is_accepted() {
        let more = "/// ```\n/// let a = A::new();\n/// a.go();\n/// ```\npub struct A;\nimpl A { pub fn new() {} pub fn go(&self) {} fn own() {} }";
        assert_eq!(findings("pub use more::A;", more), Vec::<String>::new());
    }

    #[test]
    fn type_or_method_without_an_example_is_found() {
        assert_eq!(findings("pub use more::A;", "/// Text.\npub struct A;"), ["`A` has no example"]);
        let more = "/// ```\n/// A::new();\n/// ```\npub struct A;\nimpl A { pub fn new() {} pub fn new_one() {} }";
        assert_eq!(
            findings("pub use more::A;", more),
            ["`A::new_one` has no example, and no example that names `A` calls it"]
        );
    }

    #[test]
    fn method_with_its_own_example_is_accepted() {
        let more =
            "/// ```\n/// let _: A;\n/// ```\npub struct A;\nimpl A {\n/// ```\n/// 1;\n/// ```\npub fn new() {} }";
        assert_eq!(findings("pub use more::A;", more), Vec::<String>::new());
    }

    #[test]
    fn method_in_an_example_of_another_type_is_accepted() {
        let other = "/// ```\n/// let b: B = A.make();\n/// ```\npub struct B;\n";
        let more =
            format!("{other}/// ```\n/// let _: A;\n/// ```\npub struct A;\nimpl A {{ pub fn make(&self) {{}} }}");
        assert_eq!(findings("pub use more::{A, B};", &more), Vec::<String>::new());
    }

    #[test]
    fn call_in_a_hidden_line_shows_nothing() {
        let more = "/// ```\n/// let _: A;\n/// # A::new();\n/// ```\npub struct A;\nimpl A { pub fn new() {} }";
        assert_eq!(findings("pub use more::A;", more).len(), 1);
    }

    #[test]
    fn private_types_need_no_example() {
        assert_eq!(findings("", "pub struct A;\nimpl A { pub fn new() {} }"), Vec::<String>::new());
    }

    #[test]
    fn text_block_is_no_example() {
        assert_eq!(findings("pub use more::A;", "/// ```text\n/// A\n/// ```\npub struct A;"), ["`A` has no example"]);
    }

    #[test]
    fn example_that_is_not_run_is_found() {
        let more = "/// ```no_run\n/// let _: A;\n/// ```\npub struct A;";
        let found = findings("pub use more::A;", more);
        assert!(found.len() == 1 && found[0].starts_with("has an example that is not run"), "{found:?}");
    }

    #[test]
    fn name_of_another_crate_is_shown_at_its_use() {
        let both = "/// ```\n/// use demo::{A, B};\n/// let _: A;\n/// ```\npub use partywall_other::{A, B};";
        assert_eq!(findings(both, ""), ["`B` has no example"]);
    }

    #[test]
    fn public_module_needs_an_example_at_its_top() {
        assert_eq!(
            findings("pub mod more;", "pub struct A;"),
            ["this public module has no example at its top", "`A` has no example"]
        );
    }
}
