//! The gateway: Pingora glue, relay, configuration, reload, admin, command line.

pub mod config;
pub mod exposition;
pub mod relay;
