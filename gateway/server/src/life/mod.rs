//! The process from its start to its end: how far it has come, who is still being served, whom it tells.

mod cycle;
mod handover;
mod limits;
mod notify;
mod warm;

pub use cycle::{Cycle, Signals};
pub use handover::{Inherited, Successor, offer};
pub use limits::{body_memory, connections, raise_descriptors};
pub use notify::Notifier;
pub use warm::{cold, warm};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Notify, watch};

use crate::relay::Ending;

/// How far the process has come. It never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It serves, and has not learnt yet what the engines hold.
    Warming,
    /// It serves.
    Serving,
    /// It was told to stop, and serves on until others know.
    Leaving,
    /// Nobody connects any more; what is under way is served, and what crossed with the closing of a connection.
    Draining,
    /// Their time is over: they are told.
    Ending,
}

impl Stage {
    /// A stable short name.
    pub fn name(self) -> &'static str {
        ["warming", "serving", "leaving", "draining", "ending"][self as usize]
    }
}

/// How far the process has come, and its requests under way.
pub struct Life {
    stage: watch::Sender<Stage>,
    /// From their head to the last byte of whatever they are answered.
    requests: AtomicU64,
    /// Told when there are none.
    none: Notify,
}

impl Default for Life {
    fn default() -> Self {
        Self { stage: watch::Sender::new(Stage::Warming), requests: AtomicU64::new(0), none: Notify::new() }
    }
}

impl Life {
    /// How far it has come.
    pub fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// It has come so far; without effect if it has come further.
    pub fn reach(&self, stage: Stage) {
        self.stage.send_if_modified(|now| {
            let on = *now < stage;
            *now = stage.max(*now);
            on
        });
    }

    /// The end of all requests.
    pub fn ending(&self) -> Ending {
        Ending::new(self.stage.subscribe())
    }

    /// Counts a request until what is returned is dropped.
    pub fn enter(self: &Arc<Self>) -> Entered {
        self.requests.fetch_add(1, Ordering::AcqRel);
        Entered(self.clone())
    }

    /// Requests under way.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Acquire)
    }

    /// Waits until no request is under way.
    pub async fn idle(&self) {
        loop {
            let none = self.none.notified();
            tokio::pin!(none);
            // from here on no end is missed
            none.as_mut().enable();
            if self.requests() == 0 {
                return;
            }
            none.await;
        }
    }
}

/// A request under way.
pub struct Entered(Arc<Life>);

impl Drop for Entered {
    fn drop(&mut self) {
        if self.0.requests.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_never_goes_back_and_ends_once() {
        let life = Arc::new(Life::default());
        let ending = life.ending();
        assert!(!ending.is_near());
        for stage in [Stage::Serving, Stage::Draining, Stage::Leaving] {
            life.reach(stage);
        }
        assert_eq!((life.stage(), ending.is_near(), ending.has_come()), (Stage::Draining, true, false));
        life.reach(Stage::Ending);
        ending.come().await;
        life.ending().come().await;
        assert_eq!(life.stage().name(), "ending");
    }

    #[tokio::test]
    async fn whoever_waits_for_the_last_request_is_told() {
        let life = Arc::new(Life::default());
        life.idle().await;
        let requests = [life.enter(), life.enter()];
        let waits = tokio::spawn({
            let life = life.clone();
            async move { life.idle().await }
        });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        drop(requests);
        waits.await.unwrap();
    }
}
