use super::*;
use crate::{Options, memory};

#[test]
fn end_dropped_during_rejoin_is_not_claimed() {
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let join = |name| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut listener = web.bind("echo").unwrap();
    let client = shop.connect("web:echo").unwrap();
    let (server, _) = listener.accept().unwrap();
    // What a new broker is to hear; before it does, the client is dropped.
    let claims = shop.inner.claims();
    assert_eq!(claims.len(), 1);
    drop(client);
    shop.inner.reclaim(claims);
    drop(server);
    // Each session's requests are answered in order, so after these two the broker has heard of both ends.
    shop.channels().unwrap();
    assert_eq!(web.channels().unwrap().len(), 0, "an end that no process has stays for ever");
}

/// The process has another session in the domain, so the end of this one does not release the channel.
#[test]
fn channel_dropped_just_before_its_session_is_released() {
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let join = |name| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut listener = web.bind("echo").unwrap();
    for _ in 0..20 {
        let once = join("shop");
        let clients: Vec<_> = (0..5).map(|_| once.connect("web:echo").unwrap()).collect();
        let servers: Vec<_> = (0..5).map(|_| listener.accept().unwrap().0).collect();
        drop((servers, clients, once));
    }
    let start = std::time::Instant::now();
    while !shop.channels().unwrap().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", shop.channels());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn answer_for_dropped_stream_is_not_kept() {
    let broker = partywall_daemon::Broker::embedded().unwrap();
    let join = |name| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut listener = web.bind("echo").unwrap();
    let has_asked = (0..5000).any(|_| {
        let mut client = shop.connect("web:echo").unwrap();
        let (mut server, _) = listener.accept().unwrap();
        // Until it asks for a larger ring. It takes the answer with one of its next calls, which may come too soon to be seen here.
        (0..200).any(|_| {
            std::io::Write::write_all(&mut client, &[1; 1024]).unwrap();
            std::io::Read::read_exact(&mut server, &mut [0; 1024]).unwrap();
            shop.inner.desk.kept_answers() > 0
        })
    });
    shop.channels().unwrap();
    assert_eq!((shop.inner.desk.kept_answers(), has_asked), (0, true));
}

#[test]
fn end_registered_after_rejoin_is_claimed_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = partywall_daemon::Config::new(folder.path().join("broker.sock"));
    let broker = partywall_daemon::Broker::start(&config).unwrap();
    let join = |name| Domain::builder().name(name).broker(broker.path()).join().unwrap();
    let (web, shop) = (join("web"), join("shop"));
    let mut listener = web.bind("echo").unwrap();
    let client = shop.connect("web:echo").unwrap();
    let (_server, _) = listener.accept().unwrap();
    // A channel that the broker has connected. The thread that connects it goes on after another has joined the next broker.
    let (kind, directions) = (Kind::Stream, Directions::BOTH);
    let (region, memory) =
        memory::endpoint(Side::Connecting, directions, &Options::default(), 8192, shop.epoch()).unwrap();
    let geometry = region.geometry();
    let connect = Message::Connect {
        target: "web".to_owned(),
        service: "echo".to_owned(),
        kind,
        directions,
        region: RegionReference::own_memory(geometry),
    };
    let (connected, (answer, _links)) = shop.request_with_ticket(&connect, &[memory.as_fd()]).unwrap();
    let Message::Connected { channel: late, domain: domain_id, epoch, .. } = answer else { panic!("{answer:?}") };
    drop(broker);
    let _broker = partywall_daemon::Broker::start(&config).unwrap();
    // Channels whose connecting side, which is this domain's, has been claimed.
    let claimed = || {
        let rows = shop.channels().unwrap_or_default().into_iter();
        rows.filter(|row| row.from != 0).map(|row| row.channel).collect::<Vec<_>>()
    };
    let (start, early) = (std::time::Instant::now(), client.channel_id().unwrap());
    while shop.inner.desk.is_current(connected) || claimed() != [early] {
        assert!(start.elapsed() < Duration::from_secs(60), "the domain does not join again");
        std::thread::sleep(Duration::from_millis(5));
    }
    let info = PeerInfo {
        name: "web".to_owned(),
        domain_id,
        epoch,
        user: None,
        pid: None,
        at_home: false,
        service: "echo".to_owned(),
    };
    let side = Side::Connecting;
    let registration = shop.register(late, side, &info, kind, directions, geometry, Some(memory), Some(connected));
    assert!(claimed().contains(&late), "the new broker does not count the channel");
    // The thread that has joined again may have seen it in the list, too.
    for (end, claim) in shop.inner.claims() {
        let again = shop.inner.claim(end, &claim);
        assert!(matches!(again, Err(Error::Closed(_))), "{end:?}: {again:?}");
    }
    drop(registration);
    assert_eq!(claimed(), [early]);
}
