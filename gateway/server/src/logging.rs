//! The log, on standard error.

use std::io::{IsTerminal, Write};

use tracing_subscriber::EnvFilter;

use kvgate_tiers::kv_exact::BLOCK_HASHES;

use crate::config::{LogConfig, LogFormat};
use crate::console::tell;

/// What is logged without `RUST_LOG`: of the libraries only what went wrong.
const USUAL: &str = "info,pingora=warn,pingora_core=warn,pingora_proxy=warn,tk_encode=warn";

/// Standard error, as long as it takes what is written: a full disk, or nobody who reads, is no reason to stop.
struct Log;

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        // an error would be told on standard error, and that in vain, which is a panic
        let _ = std::io::stderr().write_all(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Starts it: as `RUST_LOG` says, else at `info`, and with a line for each block that is hashed if that is wanted. A
/// second call changes nothing.
pub fn start(config: &LogConfig) {
    let given = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|given| !given.is_empty());
    let filter = EnvFilter::try_new(given.as_deref().unwrap_or(USUAL)).unwrap_or_else(|e| {
        tell(&format!("kvgate: RUST_LOG is not used: {e}"));
        EnvFilter::new(USUAL)
    });
    let blocks = config.block_hashes.then(|| format!("{BLOCK_HASHES}=trace").parse().ok()).flatten();
    let filter = blocks.into_iter().fold(filter, EnvFilter::add_directive);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Log);
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    let started = match config.format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => builder.try_init(),
    };
    drop(started);
}
