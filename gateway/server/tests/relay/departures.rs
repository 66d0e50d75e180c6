//! Clients that leave: noticed in every phase, and everything is given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use kvgate_core::Cause;
use tokio::io::AsyncWriteExt;

use crate::support::client::{H1, H2};
use crate::support::{Ask, BOTH, Client, Gateway, VIA_H1, VIA_H2, event, noise, until};

/// In every phase this often.
const TRIES: usize = 24;

/// A gateway whose engines count, per path, the requests begun and the departures seen.
struct Watch {
    gateway: Gateway,
    begun: Arc<AtomicUsize>,
    left: Arc<AtomicUsize>,
}

impl Watch {
    async fn start() -> Self {
        let (begun, left) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let gateway = Gateway::start().await;
        for path in ["/first", "/stream", "/busy", "/deaf"] {
            let (begun, left) = (begun.clone(), left.clone());
            gateway.on(path, move |c| {
                let (begun, left) = (begun.clone(), left.clone());
                async move {
                    if path != "/deaf" {
                        c.body().await?;
                    }
                    if path == "/stream" || path == "/busy" {
                        c.events().await?;
                        c.chunk(&event(0)).await?;
                    }
                    begun.fetch_add(1, Ordering::SeqCst);
                    if path == "/busy" {
                        // streams all the time
                        while c.chunk(&event(1)).await.is_ok() {
                            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                        }
                    } else {
                        c.gone().await?;
                    }
                    left.fetch_add(1, Ordering::SeqCst);
                    Err(std::io::ErrorKind::Other.into())
                }
                .boxed()
            });
        }
        Self { gateway, begun, left }
    }

    /// A client asks and leaves, by a reset every other time; the engine sees it go.
    async fn depart(&self, h2: bool, ask: &Ask, nth: usize) {
        let seen = self.begun.load(Ordering::SeqCst);
        let mut client = Client::open(self.gateway.address, h2).await;
        let stream = client.start(ask).await;
        until("the engine was asked", || self.begun.load(Ordering::SeqCst) > seen).await;
        match (client, stream) {
            (Client::H1(client), _) if nth % 2 == 1 => client.reset(),
            (Client::H2(_client), Some(mut stream)) if nth % 2 == 1 => {
                stream.reset();
                // its connection lives on until the engine knows
                until("the engine sees it go", || self.left.load(Ordering::SeqCst) > seen).await;
            }
            (Client::H2(client), _) => client.close(),
            (client, _) => drop(client),
        }
        until("the engine sees it go", || self.left.load(Ordering::SeqCst) > seen).await;
    }

    async fn finish(&self, phase: &str) {
        self.gateway.drained().await;
        until("all are counted", || self.gateway.count(|c| &c.gone) == TRIES).await;
        let outcomes = self.gateway.outcomes(0).await;
        assert!(outcomes.iter().all(|o| o.cause == Cause::ClientGone), "{phase}: {outcomes:?}");
    }
}

async fn in_phase(path: &str) {
    for (h2, engine) in BOTH {
        let watch = Watch::start().await;
        for nth in 0..TRIES {
            watch.depart(h2, &Ask::post(path, "q").via(engine), nth).await;
        }
        watch.finish(path).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_engine_is_silent() {
    in_phase("/first").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn between_two_events() {
    in_phase("/stream").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn amid_a_busy_stream() {
    in_phase("/busy").await;
}

/// No engine hears of a request whose upload was broken off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_uploading() {
    let watch = Watch::start().await;
    let gateway = &watch.gateway;
    for nth in 0..TRIES {
        if nth % 2 == 0 {
            let mut client = H1::open(gateway.address).await;
            client.raw(b"POST /first HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n").await;
            client.raw(&noise(5000)).await;
            until("the body is read", || gateway.state.buffers.free() < 64 << 20).await;
            if nth % 4 == 0 { client.reset() } else { drop(client) }
        } else {
            let mut client = H2::open(gateway.address).await;
            let ask = Ask { unsized_: true, ..Ask::post("/first", noise(5000)) };
            let mut stream = client.start(&ask, false).await;
            until("the body is read", || gateway.state.buffers.free() < 64 << 20).await;
            if nth % 4 == 1 { stream.reset() } else { client.close() }
        }
        until("the memory is given back", || gateway.state.buffers.free() == 64 << 20).await;
    }
    watch.finish("upload").await;
    assert_eq!(gateway.engines[0].hits("/first"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_waiting_for_a_choice() {
    for h2 in [false, true] {
        let watch = Watch::start().await;
        let gateway = &watch.gateway;
        for nth in 0..TRIES {
            let mut client = Client::open(gateway.address, h2).await;
            let _stream = client.start(&Ask::post("/first", "q").with("x-hold", 1)).await;
            until("it waits", || gateway.in_flight() == 1).await;
            match client {
                Client::H1(client) if nth % 2 == 1 => client.reset(),
                Client::H2(client) => client.close(),
                client => drop(client),
            }
            gateway.drained().await;
        }
        watch.finish("choice").await;
        assert_eq!(gateway.engines[0].hits("/first"), 0);
    }
}

/// The gateway's upload is blocked in an engine that reads nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_engine_is_deaf() {
    let body = noise(16 << 20);
    for (h2, engine) in [(false, VIA_H1), (false, VIA_H2), (true, VIA_H1)] {
        let watch = Watch::start().await;
        for nth in 0..4 {
            watch.depart(h2, &Ask::post("/deaf", body.clone()).via(engine), nth).await;
        }
        watch.gateway.drained().await;
        until("all are counted", || watch.gateway.count(|c| &c.gone) == 4).await;
    }
}

/// A client that ends its side counts as gone, as on pingora's own path.
#[tokio::test]
async fn by_half() {
    let watch = Watch::start().await;
    let mut client = H1::open(watch.gateway.address).await;
    client.send(&Ask::post("/first", "q").via(VIA_H1)).await;
    until("the engine was asked", || watch.begun.load(Ordering::SeqCst) == 1).await;
    client.io.get_mut().shutdown().await.unwrap();
    until("the engine sees it go", || watch.left.load(Ordering::SeqCst) == 1).await;
    assert!(client.recv("POST").await.cut);
    watch.gateway.drained().await;
}

/// The leg whose answer we keep is given up too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn during_the_prefill_leg() {
    for (h2, engine) in BOTH {
        let watch = Watch::start().await;
        for nth in 0..4 {
            watch.depart(h2, &Ask::post("/first", "q").via(engine).with("x-prefill", 1), nth).await;
        }
        watch.gateway.drained().await;
        assert_eq!(watch.gateway.engines[0].hits("/first"), 4, "no second leg");
    }
}

/// A panic in the middle of a request gives its claim back, and the process lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn by_a_panic_of_ours() {
    let gateway = Gateway::start().await;
    gateway.on("/panic", |c| {
        async move {
            c.body().await?;
            c.answer(200, b"x", &[("x-panic", "1")]).await
        }
        .boxed()
    });
    for h2 in [false, true] {
        let mut client = Client::open(gateway.address, h2).await;
        assert!(client.call(&Ask::post("/panic", "q").via(VIA_H1)).await.cut);
        gateway.drained().await;
        let mut client = Client::open(gateway.address, h2).await;
        assert_eq!(client.call(&Ask::post("/echo", "q").via(VIA_H1)).await.status, 200);
    }
}
