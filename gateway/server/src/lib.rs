//! The gateway: Pingora glue, relay, configuration, reload, admin, command line.
//!
//! A gateway with a tier of your own is a main of a few lines:
//!
//! ```no_run
//! # use kvgate_core::TierKind;
//! # static MY_TIER: TierKind = kvgate_tiers::TIERS[0];
//! fn main() -> std::process::ExitCode {
//!     kvgate::Gateway::new().tier(&MY_TIER).main()
//! }
//! ```

mod address;
mod admin;
mod alarms;
mod attempts;
mod budget;
mod cli;
pub mod config;
mod console;
mod control;
mod counts;
mod demo;
pub mod explain;
mod exposition;
mod facts;
mod forwarded;
mod health;
mod legs;
mod life;
mod logging;
mod plan;
mod prompt_record;
mod proxy;
pub mod relay;
mod replay;
pub mod run;
mod sockets;
mod telemetry;
mod told;
mod transport;
pub mod watch;
mod world;

use std::process::ExitCode;

use kvgate_core::TierKind;

/// The gateway and the tiers it knows.
#[derive(Debug)]
pub struct Gateway {
    kinds: Vec<TierKind>,
}

impl Default for Gateway {
    fn default() -> Self {
        Self::new()
    }
}

impl Gateway {
    /// With the built-in tiers.
    pub fn new() -> Self {
        Self { kinds: kvgate_tiers::TIERS.to_vec() }
    }

    /// And this one; a built-in one of the same name gives way.
    #[must_use]
    pub fn tier(mut self, kind: &TierKind) -> Self {
        self.kinds.retain(|known| known.name != kind.name);
        self.kinds.push(*kind);
        self
    }

    /// Runs the command that the process was started with.
    pub fn main(self) -> ExitCode {
        cli::main(&self.kinds)
    }

    /// The tiers it knows.
    pub fn kinds(&self) -> &[TierKind] {
        &self.kinds
    }
}
