//! A function of a test that waits inside a call until the test lets it go on.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A function that has begun when this returns something, and which continues when `go` is dropped.
pub(crate) fn gate() -> (impl Fn() + Send + Sync + 'static, Receiver<()>, Sender<()>) {
    let (begun, has_begun) = channel();
    let (go, may_go) = channel::<()>();
    let pair = Mutex::new((begun, may_go));
    let wait = move || {
        let pair = pair.lock().unwrap();
        let _ = pair.0.send(());
        let _ = pair.1.recv();
    };
    (wait, has_begun, go)
}
