//! The parts of a gateway, put together.

use std::sync::Arc;
use std::time::Duration;

use partywall::cluster::{Name, NameFeed, NameRow};
use partywall::{Domain, Error, Options, Refusal};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::GatewayConfig;
use crate::counters::GatewayCounters;
use crate::directory::{ClusterDirectory, PendingClaim};
use crate::metrics::MetricsSource;
use crate::peers::PeerHosts;
use crate::routes::Router;
use crate::shares::HostShares;
use crate::tls::HostCredentials;
use crate::{GatewayError, inbound, listing, metrics};

/// After the broker has come again, how long its clients have to come again too.
const RETURN: Duration = Duration::from_secs(10);
/// Connections of this host's programs that wait for the gateway.
const BACKLOG: u16 = 128;

/// Runs a gateway until it gets SIGTERM or SIGINT, or cannot go on.
///
/// # Errors
/// [`GatewayError`]: a certificate that is wrong, a broker that does not take this process for its gateway, or an address that is in use.
pub fn run(config: &GatewayConfig) -> Result<(), GatewayError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads())
        .enable_all()
        .build()
        .map_err(|source| GatewayError::System { doing: "start threads", source })?;
    let outcome = runtime.block_on(serve(config));
    // Threads that wait for the broker end with the process.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: &GatewayConfig) -> Result<(), GatewayError> {
    let system = |doing| move |source| GatewayError::System { doing, source };
    let mut terminate = signal(SignalKind::terminate()).map_err(system("wait for signals"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("wait for signals"))?;
    let credentials = HostCredentials::read(config)?;
    let domain = join(config)?;
    let feed = follow(&domain).await?;
    let host = host_of(&feed, &credentials, config)?;
    tracing::info!(%host, "the gateway of this host");
    // The gateway waits for the network, and sleeps between datagrams.
    let options = Options::default().backlog(BACKLOG).sleeps_often(true);
    let listener = domain.bind_routes(&options)?;
    let counters = Arc::new(GatewayCounters::default());
    let shares = HostShares::new(host.clone(), config.streams_per_host);
    let directory = Arc::new(ClusterDirectory::new(config, host));
    let server = Arc::new(inbound::InboundServer::new(domain.clone(), options, shares, Arc::clone(&counters)));
    let answer = Box::new(move |peer, send, receive| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.answer(&peer, send, receive).await });
    });
    let peers = Arc::new(PeerHosts::listen(config, credentials, answer)?);
    if let Some(table) = &config.metrics {
        let listener = metrics::listen(table.listen).await.map_err(system("listen for scrapers of metrics"))?;
        let source = MetricsSource { counters: Arc::clone(&counters), directory: Arc::clone(&directory) };
        tracing::info!("metrics at http://{}/metrics", table.listen);
        tokio::spawn(metrics::serve(listener, source));
    }
    let router = Arc::new(Router { directory: Arc::clone(&directory), peers: Arc::clone(&peers), counters });

    let runtime = Handle::current();
    let names = {
        let (domain, directory, runtime) = (domain.clone(), Arc::clone(&directory), runtime.clone());
        tokio::task::spawn_blocking(move || report_names(feed, &domain, &directory, &runtime))
    };
    let routes = tokio::task::spawn_blocking(move || router.serve(listener, &runtime));
    let following = ClusterDirectory::start(&directory);
    tokio::spawn(Arc::clone(&peers).accept());
    tokio::spawn(listing::serve(domain, Arc::clone(&directory)));

    let ended = |error: Result<Error, tokio::task::JoinError>| match error {
        Ok(error) => Err(GatewayError::Broker(error)),
        Err(_) => Err(GatewayError::Directory("a thread of the gateway has failed".to_owned())),
    };
    let outcome = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        error = names => ended(error),
        error = routes => ended(error),
    };
    following.leave().await;
    peers.close().await;
    outcome
}

fn join(config: &GatewayConfig) -> Result<Domain, GatewayError> {
    let builder = Domain::builder().name(config.domain.clone());
    let builder = match &config.broker {
        Some(path) => builder.broker(path),
        None => builder,
    };
    Ok(builder.join()?)
}

/// Follows names. The session of a gateway that has just ended may not be cleared away yet.
async fn follow(domain: &Domain) -> Result<NameFeed, GatewayError> {
    let mut left = 20;
    loop {
        match domain.follow_names() {
            Err(Error::Refused { code: Refusal::Quota, .. }) if left > 0 => {
                left -= 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            other => return Ok(other?),
        }
    }
}

/// The name of this host, which the broker's policy and the certificate must agree on.
fn host_of(feed: &NameFeed, credentials: &HostCredentials, config: &GatewayConfig) -> Result<Name, GatewayError> {
    if feed.host() == credentials.host.as_str() {
        return Ok(credentials.host.clone());
    }
    let what = config.certificate.display().to_string();
    let (certificate, policy) = (&credentials.host, feed.host());
    let reason =
        format!("it is for the host {certificate}, and [cluster] of the broker's policy says that this is {policy}");
    Err(GatewayError::Tls { what, reason })
}

/// Reports names of this host to the directory, and claims to the broker, until the broker refuses this gateway; in a separate thread.
fn report_names(mut feed: NameFeed, domain: &Domain, directory: &Arc<ClusterDirectory>, runtime: &Handle) -> Error {
    let host = feed.host().to_owned();
    loop {
        let number = directory.with_own(|own| own.begin());
        let later = Arc::clone(directory);
        runtime.spawn(async move {
            tokio::time::sleep(RETURN).await;
            later.with_own(|own| own.forget_unreported(number));
        });
        let error = loop {
            match feed.wait(Duration::from_secs(3600)) {
                Ok(rows) => {
                    for (row, claim) in directory.hear(rows) {
                        runtime.spawn(answer_claim(domain.clone(), row, claim));
                    }
                }
                Err(error) => break error,
            }
        };
        tracing::warn!(%error, "the broker is gone: its names stay for some seconds");
        let mut pause = Duration::from_millis(50);
        feed = loop {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
            match domain.follow_names() {
                Ok(feed) if feed.host() != host => {
                    return Error::Invalid(format!("this host is now called {} by the broker's policy", feed.host()));
                }
                Ok(feed) => break feed,
                Err(Error::Refused { code: Refusal::Denied, reason }) => {
                    return Error::Refused { code: Refusal::Denied, reason };
                }
                Err(_) => {}
            }
        };
    }
}

/// Tells the broker what the cluster has decided about the claim of a row. Nothing was decided if the broker has withdrawn the claim.
async fn answer_claim(domain: Domain, row: NameRow, claim: PendingClaim) {
    let Some(holder) = claim.decision().await else { return };
    let answer = move || domain.name_claimed(&row.domain, row.claim, holder.as_deref());
    let told = tokio::task::spawn_blocking(answer).await;
    if let Ok(Err(error)) = told {
        tracing::debug!(%error, "the broker did not take the answer to a claim");
    }
}
