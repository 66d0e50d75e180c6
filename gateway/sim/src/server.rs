//! The engine's listener and connections, under the control of a test.

use crate::fault::Reset;
use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// How often a busy address is tried again.
const RETRY: Duration = Duration::from_millis(10);
/// How many times.
const RETRIES: usize = 200;

/// Marks an answer that is not sent: the connection is closed instead.
#[derive(Clone, Copy)]
pub(crate) struct NoAnswer;

/// Accepts connections on one address, while it is open.
pub(crate) struct Server {
    address: SocketAddr,
    router: Router,
    open: Option<watch::Sender<()>>,
    tasks: JoinSet<()>,
}

impl Server {
    /// Listens on `address`.
    pub async fn start(address: SocketAddr, router: Router) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let mut server = Self { address: listener.local_addr()?, router, open: None, tasks: JoinSet::new() };
        server.accept(listener);
        Ok(server)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether connections are accepted.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Listens again, on the same address.
    pub async fn open(&mut self) -> io::Result<()> {
        if self.open.is_some() {
            return Ok(());
        }
        for _ in 0..RETRIES {
            match TcpListener::bind(self.address).await {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => tokio::time::sleep(RETRY).await,
                bound => {
                    self.accept(bound?);
                    return Ok(());
                }
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// Closes the listener; connections end with the answer they are at, idle ones before this returns.
    pub async fn close(&mut self) {
        if let Some(open) = self.open.take() {
            // all that is gone when its task drops the receiver
            let _ = open.send(());
            open.closed().await;
        }
    }

    /// Closes the listener and every connection, whatever it is at.
    pub async fn kill(&mut self) {
        self.open = None;
        self.tasks.shutdown().await;
    }

    fn accept(&mut self, listener: TcpListener) {
        let (open, closing) = watch::channel(());
        self.open = Some(open);
        self.tasks.spawn(accept(listener, self.router.clone(), closing));
    }
}

async fn accept(listener: TcpListener, router: Router, mut closing: watch::Receiver<()>) {
    let mut connections = JoinSet::new();
    let (ending, ended) = watch::channel(());
    let (idle, mut none_idle) = mpsc::channel(1);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve(stream, router.clone(), ended.clone(), idle.clone()))),
                Err(error) => {
                    tracing::warn!(%error, "accept");
                    tokio::time::sleep(RETRY).await;
                }
            },
            Some(_) = connections.join_next() => {}
            _ = closing.changed() => break,
        }
    }
    drop((listener, idle));
    let _ = ending.send(());
    let _ = none_idle.recv().await;
    drop(closing);
    while connections.join_next().await.is_some() {}
}

/// Serves a connection. After the end it lets go of `idle` as soon as it is known whether an answer is under way.
async fn serve(
    stream: TcpStream,
    router: Router,
    mut ended: watch::Receiver<()>,
    idle: mpsc::Sender<Infallible>,
) {
    let _ = stream.set_nodelay(true);
    let reset = Reset::default();
    let stream = Line { stream, reset: reset.clone() };
    let router = TowerToHyperService::new(router);
    let service = service_fn(async |mut request: Request<Incoming>| {
        request.extensions_mut().insert(reset.clone());
        let Ok(response): Result<Response, Infallible> = router.call(request).await;
        match response.extensions().get::<NoAnswer>() {
            Some(NoAnswer) => Err(io::Error::other("a fault that was asked for")),
            None => Ok(response),
        }
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = ended.changed() => connection.as_mut().graceful_shutdown(),
    }
    if futures::poll!(connection.as_mut()).is_pending() {
        drop(idle);
        let _ = connection.await;
    }
}

/// A connection that ends with a reset, if one was asked for.
struct Line {
    stream: TcpStream,
    reset: Reset,
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.reset.is_set() {
            let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }
}
