//! The picture of modules in ARCHITECTURE.md:
//!
//! ```text
//! preload   calls
//!           conn  udp
//!           sys
//! ```
//!
//! A line that does not begin with a blank begins with the name of a crate's folder. Every other word is a module.

/// One crate's modules, from the highest line down.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Picture {
    /// The crate's folder below `crates/`.
    pub(super) krate: String,
    pub(super) lines: Vec<Vec<String>>,
}

/// The pictures between the two marks of `document`.
pub(super) fn read(document: &str) -> Vec<Picture> {
    let mut pictures: Vec<Picture> = Vec::new();
    let marked = document
        .lines()
        .skip_while(|line| line.trim() != "<!-- modules: begin -->")
        .skip(1)
        .take_while(|line| line.trim() != "<!-- modules: end -->");
    for line in marked.filter(|line| !line.starts_with("```")) {
        let mut words = line.split_whitespace();
        if !line.starts_with(' ')
            && let Some(krate) = words.next()
        {
            pictures.push(Picture { krate: krate.to_owned(), lines: Vec::new() });
        }
        let modules: Vec<String> = words.map(str::to_owned).collect();
        if let Some(picture) = pictures.last_mut()
            && !modules.is_empty()
        {
            picture.lines.push(modules);
        }
    }
    pictures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_is_read_by_crate_and_line() {
        let text = "a b\n<!-- modules: begin -->\n```text\none   calls\n      conn  udp\n\ntwo   sys\n```\n\
                    <!-- modules: end -->\nafter\n";
        let pictures = read(text);
        assert_eq!(pictures.len(), 2);
        assert_eq!(pictures[0].krate, "one");
        assert_eq!(pictures[0].lines, [vec!["calls"], vec!["conn", "udp"]]);
        assert_eq!(pictures[1].lines, [vec!["sys"]]);
    }
}
