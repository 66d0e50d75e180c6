//! The end of the process, as requests under way see it.

use tokio::sync::watch;

/// How much longer the process is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Farewell {
    /// As long as anybody can tell.
    #[default]
    Stays,
    /// For what is under way: no connection is kept for another request.
    Leaves,
    /// No longer: whoever waits is told, and what is being passed on is ended in order.
    Ends,
}

/// What tells requests of the end, all of them at once.
#[derive(Clone, Debug, Default)]
pub struct Ending(Option<watch::Receiver<Farewell>>);

impl Ending {
    /// As this says.
    pub fn new(told: watch::Receiver<Farewell>) -> Self {
        Self(Some(told))
    }

    fn told(&self) -> Farewell {
        self.0.as_ref().map(|told| *told.borrow()).unwrap_or_default()
    }

    /// Whether an answer is the last one on its connection.
    pub fn is_near(&self) -> bool {
        self.told() != Farewell::Stays
    }

    /// Whether it has come.
    pub fn has_come(&self) -> bool {
        self.told() == Farewell::Ends
    }

    /// Waits for it.
    pub async fn come(&self) {
        if let Some(mut told) = self.0.clone()
            && told.wait_for(|told| *told == Farewell::Ends).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}
