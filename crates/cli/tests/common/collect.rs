//! Collects the output of a child.

use std::io::Read;
use std::process::Child;
use std::thread::{self, JoinHandle};

/// Reads what a child says on piped outputs, from now to its end: standard output, standard error.
pub(crate) fn collect(child: &mut Child) -> [JoinHandle<Vec<u8>>; 2] {
    fn read(from: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
        thread::spawn(move || {
            let mut all = Vec::new();
            if let Some(mut from) = from {
                from.read_to_end(&mut all).unwrap();
            }
            all
        })
    }
    [read(child.stdout.take()), read(child.stderr.take())]
}
