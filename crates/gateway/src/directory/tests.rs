//! The directory after etcd has lost its data, with an etcd that is slow or has no leader, claims that are withdrawn, and the end of a gateway.

use partywall::Kind;

use super::*;
use crate::testing::{HANG, TestEtcd, certificates, config, eventually, in_time, name};

/// The directory of alpha, which knows these names of beta.
fn alpha_with(names_of_beta: &[&str]) -> ClusterDirectory {
    let folder = certificates(&["alpha"]);
    let alpha = ClusterDirectory::new(&config(folder.path(), "alpha"), name("alpha"));
    alpha.change_table(|table| names_of_beta.iter().for_each(|name| table.put_domain(name, entry_of_beta())));
    alpha
}

/// The directory of alpha with these members of etcd. Its lease lasts for this many seconds.
fn alpha_at(endpoints: &[String], seconds: u16) -> Arc<ClusterDirectory> {
    let folder = certificates(&["alpha"]);
    let mut config = config(folder.path(), "alpha");
    (config.etcd.endpoints, config.etcd.ttl) = (endpoints.to_vec(), seconds);
    Arc::new(ClusterDirectory::new(&config, name("alpha")))
}

/// Enters domains of beta.
async fn fill(etcd: &TestEtcd, keys: &Keys, domains: usize) {
    let mut client = etcd.client().await;
    let put = |n: &usize| TxnOp::put(keys.domain(&format!("name{n}")), entry_of_beta().encode(), None);
    // Etcd takes at most 128 operations in a transaction.
    for part in (0..domains).collect::<Vec<_>>().chunks(128) {
        client.txn(Txn::new().and_then(part.iter().map(put).collect::<Vec<_>>())).await.unwrap();
    }
}

fn entry_of_beta() -> DomainEntry {
    DomainEntry { host: "beta".to_owned(), services: [].into() }
}

fn row(news: NameNews, domain: &str) -> NameRow {
    NameRow { key: 1, news, kind: Kind::Stream, claim: 7, domain: domain.into(), service: String::new() }
}

fn host_of(alpha: &ClusterDirectory, name: &str) -> Option<String> {
    alpha.with_table(|table| table.host_of(name).map(str::to_owned))
}

#[test]
fn lost_names_stay_while_others_come_back() {
    let names = ["a", "b", "c", "d"];
    let alpha = alpha_with(&names);
    let mut now = Instant::now();
    alpha.take_over(NameTable::default(), true, now);
    let almost = RETURN - Duration::from_secs(1);
    for name in &names[..2] {
        now += almost;
        alpha.change_table(|table| table.put_domain(name, entry_of_beta()));
        alpha.forget_lost_names(now);
        assert!(names.iter().all(|name| host_of(&alpha, name).is_some()), "{name} has come back");
    }
    // Then etcd is away for longer than that. One name is back when this host looks again.
    now += 5 * RETURN;
    let mut table = NameTable::default();
    names[..3].iter().for_each(|name| table.put_domain(name, entry_of_beta()));
    alpha.take_over(table, false, now);
    now += almost;
    // An entry that is written twice gives no more time.
    alpha.change_table(|table| table.put_domain("a", entry_of_beta()));
    alpha.forget_lost_names(now);
    assert!(host_of(&alpha, "d").is_some());
    alpha.forget_lost_names(now + almost);
    assert_eq!((host_of(&alpha, "c"), host_of(&alpha, "d")), (Some("beta".to_owned()), None));
}

#[test]
fn name_that_other_host_may_enter_again_is_not_written() {
    let alpha = alpha_with(&["both"]);
    alpha.with_own(|own| {
        for name in ["both", "own"] {
            own.apply(&row(NameNews::Present, name));
        }
        own.decided("both", Some("beta".to_owned()));
        own.take_dirty(9);
    });
    let now = Instant::now();
    alpha.take_over(NameTable::default(), true, now);
    let entry = WantedEntry::Entry(DomainEntry { host: "alpha".to_owned(), services: [].into() });
    assert_eq!(alpha.wanted("both"), WantedEntry::OtherHosts("beta".to_owned()));
    assert_eq!((alpha.wanted("own"), alpha.wanted("ended")), (entry, WantedEntry::Nothing));
    // Beta does not come back, so the name is free, and this host asks for it again.
    alpha.forget_lost_names(now + RETURN);
    assert!(matches!(alpha.wanted("both"), WantedEntry::Entry(_)));
    assert_eq!(alpha.with_own(|own| own.take_dirty(9)), ["both"]);
}

#[test]
fn other_or_older_data_of_etcd_is_noticed() {
    let known = DataState { identity: b"1".to_vec(), cluster: 7, revision: 50 };
    let (same, later) = (known.clone(), DataState { revision: 51, ..known.clone() });
    assert!(!same.lacks(&known) && !later.lacks(&known));
    let older = DataState { revision: 49, ..known.clone() };
    let cluster = DataState { cluster: 8, ..later.clone() };
    let identity = DataState { identity: b"2".to_vec(), ..later };
    assert!([older, cluster, identity].iter().all(|data| data.lacks(&known)));
}

#[tokio::test]
async fn withdrawn_claim_is_not_answered() {
    let alpha = alpha_with(&[]);
    alpha.set_fresh(true);
    let mut claims = alpha.hear(vec![row(NameNews::Claim, "db")]);
    assert!(alpha.hear(vec![row(NameNews::Gone, "db")]).is_empty());
    // Another program claims the name.
    claims.extend(alpha.hear(vec![row(NameNews::Claim, "db")]));
    let [(_, first), (_, second)] = claims.try_into().unwrap();
    assert_eq!(in_time("the claim ends", first.decision()).await, None);
    alpha.with_own(|own| own.decided("db", Some("beta".to_owned())));
    assert_eq!(in_time("the claim is decided", second.decision()).await, Some(Some("beta".to_owned())));
}

#[test]
fn claim_that_is_withdrawn_at_once_leaves_no_name() {
    let alpha = alpha_with(&[]);
    alpha.set_fresh(true);
    let claims = alpha.hear(vec![row(NameNews::Claim, "db"), row(NameNews::Gone, "db")]);
    assert_eq!((claims.len(), alpha.with_own(|own| own.has("db"))), (1, false));
    assert_eq!(alpha.wanted("db"), WantedEntry::Nothing);
}

#[tokio::test]
async fn stopped_directory_has_ended_its_task() {
    let alpha = Arc::new(alpha_with(&[]));
    let following = ClusterDirectory::start(&alpha);
    in_time("it leaves", following.leave()).await;
    assert_eq!(Arc::strong_count(&alpha), 1, "the task goes on, and enters this host again");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_stopped_directory_are_not_entered_again() {
    let Some(etcd) = TestEtcd::start().await else { return };
    // With a lease that outlasts this test.
    let alpha = alpha_at(std::slice::from_ref(&etcd.url), 300);
    alpha.hear(vec![row(NameNews::Present, "db")]);
    let following = ClusterDirectory::start(&alpha);
    let keys = [alpha.keys.domain("db"), alpha.keys.host("alpha")];
    let start = Instant::now();
    while !etcd.has(&keys[0]).await {
        assert!(start.elapsed() < HANG, "db is not entered");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    in_time("it leaves", following.leave()).await;
    // Longer than the pause before a new session. The program may live that long, to end its connections.
    for _ in 0..40 {
        for key in &keys {
            assert!(!etcd.has(key).await, "{key} is there after the gateway has left");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn look_longer_than_the_lease_begins_a_session() {
    const PAGES: usize = 12;
    let Some(etcd) = TestEtcd::start().await else { return };
    // The pages come one after the other, and take 6 s.
    let alpha = alpha_at(&[etcd.answering_late(Duration::from_millis(500)).await], 3);
    let domains = PAGES * usize::try_from(PAGE).unwrap();
    fill(&etcd, &alpha.keys, domains).await;
    let following = ClusterDirectory::start(&alpha);
    eventually("the directory is fresh", || alpha.freshness().0).await;
    assert_eq!(alpha.with_table(NameTable::domains), domains);
    assert!(etcd.has(&alpha.keys.host("alpha")).await);
    in_time("it leaves", following.leave()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_longer_than_the_lease_enter_all_names() {
    let Some(etcd) = TestEtcd::start().await else { return };
    // The entries of one turn are written one after the other, and take 8 s.
    let alpha = alpha_at(&[etcd.answering_late(Duration::from_millis(250)).await], 3);
    alpha.hear((0..ENTRIES_PER_TURN).map(|n| row(NameNews::Present, &format!("name{n}"))).collect());
    let following = ClusterDirectory::start(&alpha);
    eventually("all names are entered", || alpha.with_table(NameTable::domains) == ENTRIES_PER_TURN).await;
    in_time("it leaves", following.leave()).await;
}

#[test]
fn cancelled_write_turn_leaves_its_names_dirty() {
    let alpha = alpha_with(&[]);
    drop(WriteTurn { directory: &alpha, names: ["ended".to_owned(), "own".to_owned()].into() });
    assert_eq!(alpha.with_own(|own| own.take_dirty(9)), ["ended", "own"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn end_of_the_lease_begins_the_next_session() {
    let Some(etcd) = TestEtcd::start().await else { return };
    let alpha = alpha_at(std::slice::from_ref(&etcd.url), 300);
    let following = ClusterDirectory::start(&alpha);
    eventually("the directory is fresh", || alpha.freshness().0).await;
    let first = guard(&alpha.lease).unwrap();
    etcd.client().await.lease_revoke(first).await.unwrap();
    eventually("there is another lease", || *guard(&alpha.lease) != Some(first)).await;
    eventually("the directory is fresh again", || alpha.freshness().0).await;
    assert!(etcd.has(&alpha.keys.host("alpha")).await);
    in_time("it leaves", following.leave()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn directory_of_member_without_leader_is_stale() {
    let Some(mut members) = TestEtcd::start_members(3).await else { return };
    let alpha = alpha_at(std::slice::from_ref(&members[0].url), 300);
    let following = ClusterDirectory::start(&alpha);
    eventually("the directory is fresh", || alpha.freshness().0).await;
    members.truncate(1);
    eventually("the directory is stale", || !alpha.freshness().0).await;
    in_time("it leaves", following.leave()).await;
    let refused = async {
        loop {
            let Err(error) = alpha.session(&members[0].url).await;
            if error.to_string().contains("no leader") {
                break;
            }
            tokio::time::sleep(FIRST_PAUSE).await;
        }
    };
    in_time("the member refuses a session", refused).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn directory_with_one_dead_member_of_three_is_fresh() {
    let Some(mut members) = TestEtcd::start_members(3).await else { return };
    let endpoints: Vec<_> = members.iter().map(|member| member.url.clone()).collect();
    let alpha = alpha_at(&endpoints, 3);
    // Each page is a further request, which could go to the dead member.
    fill(&members[1], &alpha.keys, 20 * usize::try_from(PAGE).unwrap()).await;
    members.remove(0);
    let following = ClusterDirectory::start(&alpha);
    eventually("the directory is fresh", || alpha.freshness().0).await;
    in_time("it leaves", following.leave()).await;
    assert!(!members[0].has(&alpha.keys.host("alpha")).await, "the lease is not given back");
}
