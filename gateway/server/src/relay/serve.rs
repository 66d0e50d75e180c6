//! Choose, exchange, and choose again.

use std::future::Future;

use futures::FutureExt;
use http::header;
use kvgate_core::Phase;
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::ServerSession;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_http::{RequestHeader, ResponseHeader};
use tokio::time::Instant;

use super::answer::pass_on;
use super::busy::seconds;
use super::ending::Ending;
use super::exchange::{Came, exchange, guard};
use super::leg::{Fault, Leg, LegError, Limits, Relayed, Side};

/// Who chooses engines, and is told what became of it. It keeps the claim on the chosen engine.
pub trait Route: Send {
    /// Why nobody could be chosen.
    type Refused: Send;

    /// Chooses an engine not yet tried. Dropped when the client leaves or the time is up.
    fn choose(&mut self) -> impl Future<Output = Result<HttpPeer, Self::Refused>> + Send;

    /// Fields of the engine's head that hang on the choice.
    fn address(&self, _head: &mut RequestHeader) {}

    /// The chosen engine's final head has come, and nothing of it has reached the client: fields may be added. Also
    /// called for answers that will be refused.
    fn answered(&mut self, head: &mut ResponseHeader);

    /// The chosen engine's answer, of this status, has come to its end, and the client lacks some of it still: the
    /// claim on the engine ends. A client that sends its next request after this one finds the place free.
    fn ended(&mut self, status: u16);

    /// The chosen engine's attempt failed, or the client left it. The claim on it ends, with
    /// [`LegError::outcome`].
    fn failed(&mut self, error: &LegError);
}

/// Why a request was not served.
#[derive(Debug)]
pub enum Failure<R> {
    /// Nobody could be chosen, and nobody had been tried.
    Refused(R),
    /// The last attempt's failure, or the client left between two.
    Leg(LegError),
}

/// Chooses and exchanges until an answer is through, nobody is left, or the limits are reached.
///
/// When every engine refused, the error has the last refusal that could be kept, to be [told](tell) the client.
///
/// # Errors
/// See [`Failure`].
pub async fn serve<R: Route>(
    client: &mut ServerSession,
    connector: &Connector,
    route: &mut R,
    leg: &mut Leg<'_>,
    limits: &Limits,
) -> Result<Relayed, Failure<R::Refused>> {
    let mut last: Option<LegError> = None;
    let mut attempts = 0;
    loop {
        let peer =
            match (parked(client, limits.deadlines.total, leg.ending, route.choose()).await, last.take()) {
                (Ok(Ok(peer)), tried) => {
                    last = tried;
                    peer
                }
                (Err(gone), _) if gone.side == Side::Client => return Err(Failure::Leg(gone)),
                (Ok(Err(_)) | Err(_), Some(tried)) => return Err(Failure::Leg(tried)),
                (Ok(Err(refused)), None) => return Err(Failure::Refused(refused)),
                (Err(late), None) => return Err(Failure::Leg(late)),
            };
        route.address(&mut leg.head);
        let mut came = |came: Came<'_>| match came {
            Came::Head(head) => route.answered(head),
            Came::End(status) => route.ended(status),
        };
        let error = match exchange(client, connector, &peer, leg, limits, &mut came).await {
            Ok(relayed) => return Ok(relayed),
            Err(error) => error,
        };
        log::debug!("{peer}: {error}");
        route.failed(&error);
        // an engine that took no connection has seen nothing of it
        attempts += u32::from(error.phase != Phase::Connect);
        if !error.retryable(limits.resend) {
            return Err(Failure::Leg(error));
        }
        // an engine that had it may have used up what it names, unless it says that it did not act on it
        let acted = error.phase != Phase::Connect && error.busy.is_none() && !error.unprocessed;
        let used = leg.once && acted;
        let error = match last {
            Some(word) => telling(word, error),
            None => error,
        };
        if used || attempts >= limits.attempts || Instant::now() >= limits.deadlines.total {
            return Err(Failure::Leg(error));
        }
        last = Some(error);
    }
}

/// Of two failures of a request, one after the other, the one that says more: an engine's own word, or even its breaking
/// off, says more than that the next one could not be reached. A refusal has the shorter of the times for which both ask
/// to be left alone.
pub fn telling(word: LegError, later: LegError) -> LegError {
    let soonest = word.busy.into_iter().chain(later.busy).min();
    let mut error = if says_more(&word, &later) { word } else { later };
    let (Some(soonest), Some(own)) = (soonest, error.busy) else { return error };
    if soonest < own {
        error.busy = Some(soonest);
        if let Some(kept) = &mut error.kept {
            // a number is a valid value
            let _ = kept.head.insert_header(header::RETRY_AFTER, seconds(soonest));
        }
    }
    error
}

/// Whether the first of two failures is the one that [tells](telling) more. Where neither was reached, it is.
pub fn says_more(word: &LegError, later: &LegError) -> bool {
    let is_over = later.side == Side::Client || later.head_sent || later.is_last();
    !is_over && (word.kept.is_some() && later.kept.is_none() || later.phase == Phase::Connect)
}

/// Passes the kept refusal on, if there is one.
pub async fn tell(client: &mut ServerSession, mut error: LegError) -> LegError {
    if let Some(kept) = error.kept.take() {
        error.head_sent = true;
        error.bytes_sent = kept.body.len() as u64;
        match pass_on(client, *kept).await {
            Ok(()) => error.told = true,
            Err(e) => (error.side, error.source) = (Side::Client, Some(e)),
        }
    }
    error
}

/// Passes on an answer that was kept.
///
/// # Errors
/// The client is gone.
pub async fn deliver(client: &mut ServerSession, mut relayed: Relayed) -> Result<Relayed, LegError> {
    let Some(kept) = relayed.kept.take() else { return Ok(relayed) };
    pass_on(client, kept).await.map_err(|e| LegError {
        status: Some(relayed.status),
        head_sent: true,
        ..LegError::new(Side::Client, Phase::Answer, Fault::Broken, Some(e))
    })?;
    Ok(relayed)
}

/// Waits for a choice while the client stays and there is time. The time's end counts as no connection.
async fn parked<T>(
    client: &mut ServerSession,
    until: Instant,
    ending: &Ending,
    work: impl Future<Output = T>,
) -> Result<T, LegError> {
    guard(client, until, ending, work.map(Ok)).await.map_err(|stop| {
        let (side, fault, source) = stop.parts();
        let fault = if fault == Fault::Deadline { Fault::Total } else { fault };
        LegError::new(side, Phase::Connect, fault, source)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_shortest_time_is_told_even_of_refusals_that_were_not_kept() {
        let busy = |seconds| LegError {
            busy: Some(Duration::from_secs(seconds)),
            ..LegError::new(Side::Engine, Phase::FirstByte, Fault::Status(429), None)
        };
        for (word, later) in [(3, 8), (8, 3), (3, 3)] {
            assert_eq!(telling(busy(word), busy(later)).busy, Some(Duration::from_secs(3)));
        }
        let broken = LegError::new(Side::Engine, Phase::FirstByte, Fault::Broken, None);
        assert_eq!(telling(busy(3), broken).busy, None, "who broke off has asked for no time");
    }
}
