//! The end of the process, as requests under way see it.

use tokio::sync::watch;

use crate::life::Stage;

/// What tells requests of the end, all of them at once.
#[derive(Clone, Debug, Default)]
pub struct Ending(Option<watch::Receiver<Stage>>);

impl Ending {
    /// As the process's stage says.
    pub fn new(stage: watch::Receiver<Stage>) -> Self {
        Self(Some(stage))
    }

    fn has_reached(&self, stage: Stage) -> bool {
        self.0.as_ref().is_some_and(|now| *now.borrow() >= stage)
    }

    /// Whether an answer is the last one on its connection.
    pub fn is_near(&self) -> bool {
        self.has_reached(Stage::Leaving)
    }

    /// Whether it has come: whoever waits is told, and what is being passed on is ended in order.
    pub fn has_come(&self) -> bool {
        self.has_reached(Stage::Ending)
    }

    /// Waits for it.
    pub async fn come(&self) {
        if let Some(mut stage) = self.0.clone()
            && stage.wait_for(|stage| *stage == Stage::Ending).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}
