//! The whole gateway from outside: real sockets, simulated engines, rules from files, and nothing looked at but
//! what it answers, to clients and on its admin surface.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod affinity;
mod alarms;
mod bytes;
mod engines;
mod events;
mod failover;
mod flight;
mod framing;
mod health;
mod hits;
mod inventory;
mod life;
mod load;
mod names;
mod namespaces;
mod pairs;
mod recorded;
mod reload;
mod restart;
mod retries;
mod routing;
mod selectors;
mod session;
mod stop;
mod streams;
mod support;
mod telemetry;
mod tls;
