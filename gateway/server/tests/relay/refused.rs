//! Engines of HTTP/2 that refuse one stream of a connection (RFC 9113 section 8.7).

use std::sync::atomic::Ordering;

use futures::FutureExt;
use h2::Reason;

use crate::retries::numbered;
use crate::support::client::H1;
use crate::support::{Ask, Gateway, VIA_H2};

/// An h2 engine may say that it did not act: then another one may, even if nothing is sent twice. It is the engine's
/// word on a kept connection too, which stands.
#[tokio::test]
async fn a_refused_stream_is_tried_again_of_another() {
    let gateway = Gateway::start().await;
    let hits = numbered(&gateway, "/refused", |c, n| {
        async move {
            if n % 2 == 1 {
                c.reset_with(Reason::REFUSED_STREAM);
                return Ok(());
            }
            c.body().await?;
            c.answer(200, b"second", &[]).await
        }
        .boxed()
    });
    let mut client = H1::open(gateway.address).await;
    let mut connections = None;
    for asked in [2, 4, 6] {
        let answer = client.call(&Ask::post("/refused", "q").via(VIA_H2)).await;
        assert_eq!((answer.text().as_str(), hits.load(Ordering::SeqCst)), ("second", asked));
        assert_eq!(answer.get("x-served-by"), Some("3"));
        let open = gateway.engines[0].connections();
        assert_eq!(*connections.get_or_insert(open), open, "no connection for a refusal");
    }
}

/// What may be sent once is not used up by an engine that did not act on it.
#[tokio::test]
async fn a_refused_stream_uses_nothing_up() {
    let gateway = Gateway::start().await;
    for (path, reason, status, asked) in
        [("/unused", Reason::REFUSED_STREAM, 200, 2), ("/used", Reason::INTERNAL_ERROR, 502, 1)]
    {
        let hits = numbered(&gateway, path, move |c, n| {
            async move {
                if n == 1 {
                    c.reset_with(reason);
                    return Ok(());
                }
                c.echo().await
            }
            .boxed()
        });
        let ask = Ask::post(path, "q").via(VIA_H2).with("x-once", 1).with("x-resend", 1);
        let answer = H1::open(gateway.address).await.call(&ask).await;
        assert_eq!((answer.status, hits.load(Ordering::SeqCst)), (status, asked), "{path}");
    }
}
