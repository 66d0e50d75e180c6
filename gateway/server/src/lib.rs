//! The gateway: Pingora glue, relay, configuration, reload, admin, command line.

pub mod exposition;
pub mod relay;
