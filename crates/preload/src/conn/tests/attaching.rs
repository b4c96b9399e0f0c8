//! What happens to a connection while a thread attaches its ring.

use super::*;

#[test]
fn connection_that_cannot_have_a_ring_after_all_stays_usable() {
    let p = Pair::candidates(4096);
    // Somebody waits for it who cannot be told of a ring.
    p.conn_a().local().ready.become_unknown();
    p.bring_up();
    assert_eq!(send(p.a, b"by tcp", 0), Ok(6));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by tcp");
    assert_eq!(send(p.b, b"and back", 0), Ok(8));
    assert_eq!(recv(p.a, 9, 0).unwrap(), b"and back");
    assert_eq!((ways(p.conn_a()).0, ways(p.conn_b()).0), (Way::Tcp, Way::Tcp));
    assert_eq!(p.conn_a().reason(), Reason::Shared);
}
