//! The log, on standard error.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

use kvgate_tiers::kv_exact::BLOCK_HASHES;

use crate::config::{LogConfig, LogFormat};
use crate::console::tell;

/// What is logged without `RUST_LOG`: of the libraries only what went wrong.
const USUAL: &str = "info,pingora=warn,pingora_core=warn,pingora_proxy=warn,tk_encode=warn";

/// Lines that wait to be written, at most.
const WAITING: usize = 8192;
/// How long the last lines of the process may take to be written.
const LAST_LINES: Duration = Duration::from_millis(200);

/// Lines handed over and not yet written.
static PENDING: AtomicUsize = AtomicUsize::new(0);
/// Lines that found no room, or could not be written, since that was said last.
static LOST: AtomicUsize = AtomicUsize::new(0);

/// Hands a line over to the thread that writes it. A full disk is no reason to stop, and a reader that does not read none
/// to wait: lines are then lost, and counted.
#[derive(Clone)]
struct Line(SyncSender<Vec<u8>>);

impl Line {
    /// Starts the thread; it ends with the process.
    fn start() -> std::io::Result<Self> {
        let (line, lines) = sync_channel::<Vec<u8>>(WAITING);
        let write = move || {
            for line in lines {
                put(&mut std::io::stderr(), &line, &LOST);
                PENDING.fetch_sub(1, Ordering::Release);
            }
        };
        std::thread::Builder::new().name("log".into()).spawn(write)?;
        Ok(Self(line))
    }
}

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        PENDING.fetch_add(1, Ordering::Acquire);
        if self.0.try_send(line.to_vec()).is_err() {
            PENDING.fetch_sub(1, Ordering::Release);
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes a line, and how many were lost before it; what cannot be written is lost, too.
fn put(to: &mut impl Write, line: &[u8], lost: &AtomicUsize) {
    if to.write_all(line).is_err() {
        lost.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let before = lost.swap(0, Ordering::Relaxed);
    if before > 0 && writeln!(to, "kvgate: {before} lines of the log were lost: nobody took them").is_err() {
        lost.fetch_add(before, Ordering::Relaxed);
    }
}

/// Waits until every line is written, for a moment at most: to be called at the end of the process.
pub fn flush() {
    let until = Instant::now() + LAST_LINES;
    while PENDING.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
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
    let line = match Line::start() {
        Ok(line) => line,
        Err(e) => return tell(&format!("kvgate: no log: {e}")),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || line.clone());
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    let started = match config.format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => builder.try_init(),
    };
    if started.is_ok() {
        std::panic::set_hook(Box::new(panicked));
    }
}

/// Logs a panic: written on the thread that panics, it would hold that up for good where nobody reads.
fn panicked(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(ToString::to_string).unwrap_or_default();
    let message = panic.payload_as_str().unwrap_or("no message");
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default();
    // taken if `RUST_BACKTRACE` says so
    let trace = Backtrace::capture();
    match trace.status() {
        BacktraceStatus::Captured => {
            tracing::error!("thread {name:?} panicked at {place}: {message}\n{trace}")
        }
        _ => tracing::error!("thread {name:?} panicked at {place}: {message}"),
    }
    if name == "main" {
        // the process may end with it
        flush();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What is logged.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(line)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// A disk, and how many writes of it fail.
    struct Disk(Vec<u8>, std::ops::Range<u32>, u32);

    impl Write for Disk {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.2 += 1;
            if self.1.contains(&self.2) {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            self.0.write(line)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_a_full_disk_took_are_told_when_there_is_room_again() {
        let (mut disk, lost) = (Disk(Vec::new(), 2..5, 0), AtomicUsize::new(0));
        for line in 1..=6 {
            put(&mut disk, format!("{line}\n").as_bytes(), &lost);
        }
        let told = "1\n5\nkvgate: 3 lines of the log were lost: nobody took them\n6\n";
        assert_eq!(String::from_utf8(disk.0).unwrap(), told);
        assert_eq!(lost.into_inner(), 0);
    }

    #[test]
    fn a_panic_is_a_line_of_the_log() {
        let lines = Lines::default();
        let taken = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || taken.clone()).finish();
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(panicked));
        let caught = tracing::subscriber::with_default(log, || {
            std::panic::catch_unwind(|| panic!("boom {}", std::hint::black_box(1)))
        });
        std::panic::set_hook(before);
        assert!(caught.is_err());
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(text.contains("panicked at gateway/server/src/logging.rs:"), "{text}");
        assert!(text.contains(": boom 1"), "{text}");
    }
}
