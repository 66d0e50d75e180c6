//! The end of the time that requests under way have when the process stops.

use tokio::sync::watch;

/// Comes once, for all requests at once: whoever waits is told, and what is being passed on is ended in order.
#[derive(Clone, Debug, Default)]
pub struct Ending(Option<watch::Receiver<bool>>);

impl Ending {
    /// Comes when this is true.
    pub fn new(told: watch::Receiver<bool>) -> Self {
        Self(Some(told))
    }

    /// Whether it has come.
    pub fn has_come(&self) -> bool {
        self.0.as_ref().is_some_and(|told| *told.borrow())
    }

    /// Waits for it.
    pub async fn come(&self) {
        if let Some(mut told) = self.0.clone()
            && told.wait_for(|told| *told).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}
