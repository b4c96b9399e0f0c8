//! Everything that a run has printed and drawn, as one HTML file that needs no other: no script, no style sheet, no picture beside it.

use std::fmt::Write as _;

use crate::{
    error::Result,
    report::plot::{self, Picture},
};

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}\
    h2{margin-top:2em}pre{overflow-x:auto;background:#f6f7f8;padding:.8em 1em;font-size:13px;line-height:1.35}\
    figure{margin:1em 0}figure svg{max-width:100%;height:auto}.host{color:#555}";

/// A page that grows while the bench runs.
#[derive(Debug, Default)]
pub(crate) struct HtmlReport {
    body: String,
}

impl HtmlReport {
    /// Adds what was printed: headings and notes by their marks, and everything else as it stands.
    pub(crate) fn add_text(&mut self, text: &str) {
        let mut plain = String::new();
        for line in text.lines() {
            let (tag, class, words) = match (line.strip_prefix("## "), line.strip_prefix("# ")) {
                (Some(heading), _) => ("h2", "", heading),
                (None, Some(note)) => ("p", " class=\"host\"", note),
                (None, None) => {
                    plain.push_str(line);
                    plain.push('\n');
                    continue;
                }
            };
            self.add_plain(&mut plain);
            let _ = writeln!(self.body, "<{tag}{class}>{}</{tag}>", escaped(words));
        }
        self.add_plain(&mut plain);
    }

    fn add_plain(&mut self, text: &mut String) {
        let lines = std::mem::take(text);
        let lines = lines.trim_matches('\n').trim_end();
        if !lines.is_empty() {
            let _ = writeln!(self.body, "<pre>{}</pre>", escaped(lines));
        }
    }

    /// Adds a picture, if it has data.
    pub(crate) fn add_picture(&mut self, stem: &str, picture: &Picture) -> Result<()> {
        if let Some(svg) = plot::svg(stem, picture)? {
            let _ = writeln!(self.body, "<figure id=\"{}\">{svg}</figure>", escaped(stem));
        }
        Ok(())
    }

    /// The whole page.
    pub(crate) fn page(&self, title: &str) -> String {
        let (title, body) = (escaped(title), &self.body);
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n<style>{STYLE}</style></head>\n\
             <body><h1>{title}</h1>\n{body}</body></html>\n"
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_text_becomes_headings_notes_and_tables_in_order() {
        let mut report = HtmlReport::default();
        report.add_text("# a <machine>");
        report.add_text("\n## First\n\nmechanism  p50\nring       1 & 2\n");
        report.add_text("");
        let page = report.page("bench");
        let expected = "<p class=\"host\">a &lt;machine&gt;</p>\n<h2>First</h2>\n<pre>mechanism  p50\nring       1 &amp; 2</pre>\n</body>";
        assert!(page.contains(expected), "{page}");
        assert!(page.starts_with("<!DOCTYPE html>") && !page.contains("http"), "{page}");
    }
}
