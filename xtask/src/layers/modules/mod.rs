//! Modules inside a crate use one another only downwards, along the picture in ARCHITECTURE.md.
//!
//! The picture is the table: [`picture`] reads it from the document. [`arrows`] finds which module uses which. An arrow that
//! points upwards or sideways is an error. Deeper modules have no picture: those of one module must not use one another in a circle.
//! A method call names no module, so the check sees only paths.

mod arrows;
mod picture;

use std::collections::{BTreeMap, BTreeSet};

use arrows::Arrow;
use picture::Picture;

use crate::error::Error;
use crate::report::Finding;
use crate::tree::Tree;

const DOCUMENT: &str = "ARCHITECTURE.md";

/// The findings, and a note for each crate of the picture.
pub(super) fn check(tree: &Tree) -> Result<(Vec<Finding>, Vec<String>), Error> {
    let pictures = picture::read(&tree.read(DOCUMENT)?.text);
    let files = tree.files("rs")?;
    let (mut findings, mut notes) = (Vec::new(), Vec::new());
    if pictures.is_empty() {
        findings
            .push(Finding::new(DOCUMENT, "has no picture of modules (between `<!-- modules: begin -->` and `end`)"));
    }
    findings.extend(without_picture(&pictures, files.iter().map(|file| file.path.as_str())));
    for picture in &pictures {
        let sources = arrows::read(&picture.krate, &files)?;
        let found = sources.arrows(&[]);
        findings.extend(judge(picture, &found));
        for parent in sources.parents().into_iter().filter(|parent| !parent.is_empty()) {
            let circles = circles(&sources.arrows(parent).arrows);
            findings.extend(judge_circles(&parent.join("::"), circles));
        }
        let arrows: BTreeSet<_> = found.arrows.iter().map(|arrow| (&arrow.from, &arrow.to)).collect();
        notes.push(format!("{}: {} modules, {} arrows", picture.krate, found.modules.len(), arrows.len()));
    }
    Ok((findings, notes))
}

fn judge_circles(parent: &str, circles: Vec<(String, String)>) -> Vec<Finding> {
    let circle = |(place, circle)| {
        Finding::new(place, format!("the modules of `{parent}` use one another in a circle: {circle}"))
    };
    circles.into_iter().map(circle).collect()
}

/// The circles among the ends of `arrows`: of each, the place of an arrow in it, and its modules. An item of the parent itself closes none.
fn circles(arrows: &[Arrow]) -> Vec<(String, String)> {
    let mut uses: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for arrow in arrows {
        uses.entry(&arrow.from).or_default().insert(&arrow.to);
    }
    let reached = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            for &to in uses.get(module).into_iter().flatten() {
                if seen.insert(to) {
                    next.push(to);
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&str, BTreeSet<&str>> = uses.keys().map(|module| (*module, reached(module))).collect();
    let (mut found, mut done) = (Vec::new(), BTreeSet::new());
    for (&module, to) in &reach {
        let is_in = |other: &&str| to.contains(*other) && reach.get(*other).is_some_and(|back| back.contains(module));
        let circle: BTreeSet<&str> = reach.keys().copied().filter(is_in).collect();
        if circle.len() > 1 && done.insert(circle.clone()) {
            let inside = |arrow: &&Arrow| circle.contains(arrow.from.as_str()) && circle.contains(arrow.to.as_str());
            let inside: Vec<&Arrow> = arrows.iter().filter(inside).collect();
            let pairs: BTreeSet<String> =
                inside.iter().map(|arrow| format!("{} -> {}", arrow.from, arrow.to)).collect();
            let place = inside.first().map(|arrow| arrow.place.clone()).unwrap_or_default();
            found.push((place, pairs.into_iter().collect::<Vec<_>>().join(", ")));
        }
    }
    found
}

/// Libraries that the document has no picture of.
fn without_picture<'a>(pictures: &[Picture], files: impl Iterator<Item = &'a str>) -> Vec<Finding> {
    let library = |path: &'a str| path.strip_prefix("crates/")?.strip_suffix("/src/lib.rs");
    let drawn = |krate: &&str| pictures.iter().any(|picture| picture.krate == *krate);
    let missing = files.filter_map(library).filter(|krate| !drawn(krate));
    missing.map(|krate| Finding::new(krate, format!("its modules have no picture in {DOCUMENT}"))).collect()
}

fn judge(picture: &Picture, found: &arrows::Found) -> Vec<Finding> {
    let mut findings = Vec::new();
    let krate = &picture.krate;
    let level: BTreeMap<&str, usize> = picture
        .lines
        .iter()
        .enumerate()
        .flat_map(|(level, modules)| modules.iter().map(move |module| (module.as_str(), level)))
        .collect();
    for module in found.modules.iter().filter(|module| !level.contains_key(module.as_str())) {
        findings.push(Finding::new(krate, format!("its module `{module}` has no place in the picture of {DOCUMENT}")));
    }
    for module in level.keys().filter(|module| !found.modules.contains(**module)) {
        findings
            .push(Finding::new(krate, format!("the picture of {DOCUMENT} has `{module}`, which is no module of it")));
    }
    let points_down = |arrow: &Arrow| match (level.get(arrow.from.as_str()), level.get(arrow.to.as_str())) {
        // The picture is drawn from the top.
        (Some(from), Some(to)) => from < to,
        // A module without a place is a separate finding.
        _ => arrow.to != arrows::ROOT,
    };
    for arrow in found.arrows.iter().filter(|arrow| !points_down(arrow)) {
        let what = match arrow.to.as_str() {
            arrows::ROOT => format!("module `{}` uses an item of lib.rs, which is above all modules", arrow.from),
            _ => format!(
                "module `{}` uses `{}`, which is not below it in the picture of {DOCUMENT}",
                arrow.from, arrow.to
            ),
        };
        findings.push(Finding::new(&arrow.place, what));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        let lines = [&["calls"][..], &["conn", "udp"], &["sys"]];
        let lines = lines.map(|line| line.iter().map(|module| (*module).to_owned()).collect()).to_vec();
        Picture { krate: "one".to_owned(), lines }
    }

    fn findings(arrows: &[(&str, &str)]) -> Vec<String> {
        let arrow = |(from, to): &(&str, &str)| Arrow {
            from: (*from).to_owned(),
            to: (*to).to_owned(),
            place: "a.rs:1".to_owned(),
        };
        let modules = ["calls", "conn", "udp", "sys"].map(str::to_owned).into();
        let found = arrows::Found { modules, arrows: arrows.iter().map(arrow).collect() };
        judge(&picture(), &found).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn circle_of_modules_is_found_once() {
        let arrow = |(from, to): &(&str, &str)| Arrow {
            from: (*from).to_owned(),
            to: (*to).to_owned(),
            place: format!("{from}.rs:1"),
        };
        let of = |pairs: &[(&str, &str)]| circles(&pairs.iter().map(arrow).collect::<Vec<_>>());
        assert_eq!(of(&[("a", "b"), ("b", "c"), ("a", "c"), ("c", arrows::ROOT)]), []);
        let found = of(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]);
        assert_eq!(found, [("a.rs:1".to_owned(), "a -> b, b -> c, c -> a".to_owned())]);
    }

    #[test]
    fn module_with_a_circle_is_a_finding() {
        let circle = vec![("a.rs:1".to_owned(), "a -> b, b -> a".to_owned())];
        assert_eq!(judge_circles("conn", circle).len(), 1);
        assert_eq!(judge_circles("conn", Vec::new()).len(), 0);
    }

    #[test]
    fn library_without_picture_is_found() {
        let files =
            ["crates/one/src/lib.rs", "crates/two/src/lib.rs", "crates/cli/src/main.rs", "examples/a/src/lib.rs"];
        let findings = without_picture(&[picture()], files.into_iter());
        assert_eq!(findings.iter().map(|finding| finding.place.as_str()).collect::<Vec<_>>(), ["two"]);
    }

    #[test]
    fn downward_arrow_passes() {
        assert_eq!(findings(&[("calls", "conn"), ("calls", "sys"), ("udp", "sys")]), Vec::<String>::new());
    }

    #[test]
    fn upward_or_sideways_arrow_is_found() {
        for pair in [("sys", "conn"), ("conn", "udp"), ("conn", arrows::ROOT)] {
            assert_eq!(findings(&[pair]).len(), 1, "{pair:?}");
        }
    }

    #[test]
    fn module_missing_from_picture_or_source_is_found() {
        let mut picture = picture();
        picture.lines[0] = vec!["gone".to_owned()];
        let found =
            arrows::Found { modules: ["calls", "conn", "udp", "sys"].map(str::to_owned).into(), arrows: vec![] };
        assert_eq!(judge(&picture, &found).len(), 2);
    }
}
