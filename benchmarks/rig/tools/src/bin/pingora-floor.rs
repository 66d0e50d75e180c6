//! The framework floor: a Pingora proxy that only picks the next backend (round robin) and moves bytes.
//! No body parsing, no metrics, no health checks: what any Pingora-based gateway pays before its own work.

use async_trait::async_trait;
use clap::Parser;
use pingora::lb::{LoadBalancer, selection::RoundRobin};
use pingora::prelude::*;
use pingora::server::Server;
use pingora::server::configuration::ServerConf;

struct Floor(LoadBalancer<RoundRobin>);

#[async_trait]
impl ProxyHttp for Floor {
    type CTX = ();
    fn new_ctx(&self) -> Self::CTX {}

    async fn upstream_peer(&self, _s: &mut Session, _c: &mut ()) -> Result<Box<HttpPeer>> {
        let up = self.0.select(b"", 16).ok_or_else(|| Error::new(ErrorType::ConnectNoRoute))?;
        Ok(Box::new(HttpPeer::new(up, false, String::new())))
    }
}

/// Takes turns among the backends, and does nothing else.
#[derive(Parser)]
struct Opts {
    /// Where to listen
    listen: String,
    /// Threads to serve on
    threads: usize,
    /// Addresses to pass requests on to
    #[arg(required = true)]
    backends: Vec<String>,
}

fn main() -> std::io::Result<()> {
    let o = Opts::parse();
    let conf = ServerConf {
        threads: o.threads,
        upstream_keepalive_pool_size: 512,
        grace_period_seconds: Some(0),
        graceful_shutdown_timeout_seconds: Some(0),
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let lb = LoadBalancer::try_from_iter(&o.backends)?;
    let mut svc = http_proxy_service(&server.configuration, Floor(lb));
    svc.add_tcp(&o.listen);
    server.add_service(svc);
    server.run_forever();
}
