//! When to read the configuration again: files that change and the signal SIGHUP, as one stream.
//!
//! What counts is not the events of the file system but what stands in it: after any event, and every few seconds
//! without one, the files that matter are looked at (`stat`, not content) and compared with what was seen last. So
//! editors that write beside a file and rename, symbolic links that are swapped (as Kubernetes does for a
//! ConfigMap), folders deleted and made anew, and file systems that report nothing are all the same case, and files
//! that are none of the gateway's wake nobody. Events only make it quick.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use rustix::io::Errno;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::rule_files;

/// How often the files are looked at when no event tells of a change.
const POLL: Duration = Duration::from_secs(3);
/// A change that goes on and on is read after so many times the debounce.
const PATIENCE: u32 = 10;
/// By how much the clock that stamps files may lag behind the one that is read (a tick of the kernel's, and to spare).
const CLOCK_LAG: Duration = Duration::from_millis(100);
/// The most files and folders looked at.
const MAX_FILES: usize = 50_000;

/// Why the configuration should be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReloadRequest {
    /// A file changed.
    Files,
    /// The process was sent SIGHUP.
    Signal,
}

impl std::fmt::Display for ReloadRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Files => "files",
            Self::Signal => "signal",
        })
    }
}

/// A watch on the configuration.
#[derive(Debug)]
pub struct Watch {
    file: PathBuf,
    rules: Option<PathBuf>,
    tokenizers: Option<PathBuf>,
    files: Vec<PathBuf>,
    debounce: Duration,
    poll: Duration,
    hangup: Signal,
    wake: Arc<Notify>,
    /// `None` where the system offers no events: the poll finds what changes.
    watcher: Option<RecommendedWatcher>,
    /// Why it does not, until that is logged: there is no log before the configuration is read.
    no_events: Option<notify::Error>,
    /// The folders that events come from, by what they were when that was set up.
    armed: BTreeMap<PathBuf, Id>,
    seen: Snapshot,
    /// The folder of rules as it was before that.
    folder: Option<Stamp>,
    /// What was read may not be what was seen.
    again: bool,
    /// The last look failed.
    blind: bool,
    /// When a request was handed out last.
    asked: SystemTime,
    pending: Option<Pending>,
    next_poll: Instant,
}

/// Something that may be a change: looked at when it has been quiet for long enough.
#[derive(Debug)]
struct Pending {
    since: Instant,
    due: Instant,
    signal: bool,
}

impl Watch {
    /// Watches `gateway.toml` and takes over SIGHUP, which from now on does not end the process. Call it within a
    /// runtime that lives as long as the process.
    ///
    /// # Errors
    /// When the signal cannot be taken over, or there are no descriptors to look with.
    pub fn new(file: &Path) -> io::Result<Self> {
        let wake = Arc::new(Notify::new());
        let waker = wake.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.map_or(true, |event| is_change(&event.kind)) {
                waker.notify_one();
            }
        });
        let (watcher, no_events) = match watcher {
            Ok(watcher) => (Some(watcher), None),
            Err(e) => (None, Some(e)),
        };
        let mut watch = Self {
            file: file.to_owned(),
            rules: None,
            tokenizers: None,
            files: Vec::new(),
            debounce: Duration::from_millis(200),
            poll: POLL,
            hangup: signal(SignalKind::hangup())?,
            wake,
            watcher,
            no_events,
            armed: BTreeMap::new(),
            seen: Snapshot::default(),
            folder: None,
            again: false,
            blind: false,
            asked: SystemTime::now(),
            pending: None,
            next_poll: Instant::now() + POLL,
        };
        watch.arm()?;
        watch.seen = watch.snapshot()?;
        Ok(watch)
    }

    /// Watches these folders and files (certificates and keys) from now on; to be called after each reading. What
    /// changed in them since the last request was handed out, or since the watch was made, asks for one.
    pub fn follow(&mut self, rules: &Path, tokenizers: &Path, files: Vec<PathBuf>, debounce: Duration) {
        if let Some(e) = self.no_events.take() {
            tracing::warn!("no events of file changes: {e}");
        }
        self.debounce = debounce;
        let folders = (self.rules.as_deref(), self.tokenizers.as_deref());
        if folders == (Some(rules), Some(tokenizers)) && self.files == files {
            // A file that came after the look may have been read; if it goes before the next, only the folder tells.
            if self.folder != Stamp::at(rules) {
                self.again = true;
                self.delay(false);
            }
            return;
        }
        self.rules = Some(rules.to_owned());
        self.tokenizers = Some(tokenizers.to_owned());
        self.files = files;
        // A clock that lags makes a file look older than it is.
        let asked = self.asked.checked_sub(CLOCK_LAG).unwrap_or(UNIX_EPOCH);
        // what cannot be seen now is new when it can
        let mut seen = self.arm().and_then(|()| self.snapshot()).unwrap_or_default();
        seen.0.retain(|_, stamp| stamp.is_none_or(|stamp| stamp.before(asked)));
        let named = |path: &Path| path == self.file || self.files.iter().any(|file| file == path);
        let followed = |path: &Path| named(path) || path.starts_with(rules) || path.starts_with(tokenizers);
        seen.0.extend(std::mem::take(&mut self.seen.0).into_iter().filter(|(path, _)| followed(path)));
        self.seen = seen;
        self.delay(false);
    }

    /// The next request, once the files have been left alone for the debounce; any number of changes and signals
    /// until then are one. May be dropped and called again at any time. It looks at the files where it runs: not on a
    /// thread that serves requests.
    pub async fn next(&mut self) -> ReloadRequest {
        loop {
            let due = self.pending.as_ref().map_or(self.next_poll, |pending| pending.due);
            tokio::select! {
                biased;
                Some(()) = self.hangup.recv() => self.delay(true),
                () = self.wake.notified() => self.delay(false),
                () = tokio::time::sleep_until(due) => {
                    if let Some(request) = self.look() {
                        return request;
                    }
                }
            }
        }
    }

    /// Waits for quiet, counted from now.
    fn delay(&mut self, signal: bool) {
        let now = Instant::now();
        let (since, before) = self.pending.as_ref().map_or((now, false), |p| (p.since, p.signal));
        let latest = since + self.debounce * PATIENCE;
        self.pending =
            Some(Pending { since, due: (now + self.debounce).min(latest), signal: signal || before });
    }

    /// Compares what stands in the file system with what was seen last.
    fn look(&mut self) -> Option<ReloadRequest> {
        self.next_poll = Instant::now() + self.poll;
        let armed = self.arm();
        let asked = SystemTime::now();
        let folder = self.rules.as_deref().and_then(Stamp::at);
        let now = match armed.and_then(|()| self.snapshot()) {
            Ok(now) => now,
            Err(e) => {
                // folders that cannot be opened would look as if they were empty
                if !std::mem::replace(&mut self.blind, true) {
                    tracing::warn!("whether the configuration has changed cannot be seen: {e}");
                }
                if let Some(pending) = &mut self.pending {
                    pending.due = self.next_poll;
                }
                return None;
            }
        };
        (self.blind, self.folder) = (false, folder);
        let changed = now != self.seen;
        let Some(pending) = self.pending.take() else {
            // Found by the poll: whoever changes the files may not be done.
            if changed {
                self.delay(false);
            }
            return None;
        };
        if !changed && !pending.signal && !self.again {
            return None;
        }
        self.again = false;
        self.seen = now;
        self.asked = asked;
        Some(if pending.signal { ReloadRequest::Signal } else { ReloadRequest::Files })
    }

    /// Has events come from every folder that matters, and no other, as it stands now.
    fn arm(&mut self) -> io::Result<()> {
        let Some(watcher) = &mut self.watcher else { return Ok(()) };
        let parent = self.file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let tokenizers = self.tokenizers.as_deref();
        let models = tokenizers.map(children).transpose()?.unwrap_or_default();
        let models = models.into_iter().filter(|path| path.is_dir());
        let folders = [Some(parent), self.rules.as_deref(), tokenizers].into_iter().flatten();
        let folders = folders.chain(self.files.iter().filter_map(|file| file.parent()));
        let wanted: BTreeMap<PathBuf, Id> = folders
            .map(Path::to_owned)
            .chain(models)
            .filter_map(|path| fs::metadata(&path).ok().map(|meta| (path, Id::of(&meta))))
            .collect();
        self.armed.retain(|path, folder| {
            let kept = wanted.get(path) == Some(folder);
            if !kept {
                // It may be gone already, and its watch with it.
                _ = watcher.unwatch(path);
            }
            kept
        });
        for (path, folder) in wanted {
            if self.armed.contains_key(&path) {
                continue;
            }
            match watcher.watch(&path, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.armed.insert(path, folder)),
                Err(e) => tracing::debug!("no events of changes in {}: {e}", path.display()),
            }
        }
        Ok(())
    }

    fn snapshot(&self) -> io::Result<Snapshot> {
        let mut files: Vec<_> = std::iter::once(&self.file).chain(&self.files).cloned().collect();
        if let Some(rules) = &self.rules {
            files.extend(or_none(rule_files(rules))?);
        }
        if let Some(tokenizers) = &self.tokenizers {
            for model in children(tokenizers)? {
                files.extend(children(&model)?);
            }
        }
        let stamped = files.into_iter().take(MAX_FILES).map(|path| {
            let stamp = Stamp::at(&path);
            (path, stamp)
        });
        Ok(Snapshot(stamped.collect()))
    }
}

/// What is in a folder, if it is one. Fails only for want of descriptors.
fn children(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder);
    or_none(entries.map(|entries| entries.flatten().map(|entry| entry.path()).collect()))
}

/// What cannot be read is not there, unless it is that nothing can be.
fn or_none(found: io::Result<Vec<PathBuf>>) -> io::Result<Vec<PathBuf>> {
    const RUN_OUT: [i32; 2] = [Errno::MFILE.raw_os_error(), Errno::NFILE.raw_os_error()];
    match found {
        Err(e) if e.raw_os_error().is_some_and(|code| RUN_OUT.contains(&code)) => Err(e),
        found => Ok(found.unwrap_or_default()),
    }
}

fn is_change(kind: &EventKind) -> bool {
    match kind {
        EventKind::Access(access) => *access == AccessKind::Close(AccessMode::Write),
        _ => true,
    }
}

/// What tells a file or folder from the one that was there before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Id {
    device: u64,
    inode: u64,
}

impl Id {
    fn of(meta: &Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino() }
    }
}

/// What tells a file, as it stands, from what was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    id: Id,
    size: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(meta: &Metadata) -> Self {
        Self {
            id: Id::of(meta),
            size: meta.size(),
            written: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|meta| Self::of(&meta))
    }

    /// Whether the file has not changed since `time`.
    fn before(&self, time: SystemTime) -> bool {
        let time = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        self.changed < (seconds, i64::from(time.subsec_nanos()))
    }
}

/// The files that matter; `None` for those that cannot be looked at.
#[derive(Debug, Default, PartialEq, Eq)]
struct Snapshot(BTreeMap<PathBuf, Option<Stamp>>);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    struct Files(tempfile::TempDir);

    impl Files {
        fn new() -> Self {
            let files = Self(tempfile::tempdir().unwrap());
            fs::create_dir(files.at("rules")).unwrap();
            fs::create_dir_all(files.at("tokenizers/m")).unwrap();
            files.write("gateway.toml", "1");
            files.write("rules/a.toml", "1");
            files.write("tokenizers/m/tokenizer.json", "1");
            fs::create_dir(files.at("certs")).unwrap();
            files.write("certs/a.pem", "1");
            files
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.at(name), text).unwrap();
        }

        /// Written beside and renamed, as editors do.
        fn replace(&self, name: &str, text: &str) {
            self.write("rules/.tmp", text);
            fs::rename(self.at("rules/.tmp"), self.at(name)).unwrap();
        }

        /// A watch that has settled. With `poll` short and no events it is the poll that finds changes.
        async fn watch(&self, events: bool) -> Watch {
            let mut watch = Watch::new(&self.at("gateway.toml")).unwrap();
            watch.debounce = Duration::from_millis(50);
            if events {
                watch.poll = Duration::from_secs(3600);
                watch.next_poll = Instant::now() + watch.poll;
            } else {
                watch.watcher = None;
                watch.poll = Duration::from_millis(100);
                watch.next_poll = Instant::now() + watch.poll;
            }
            let certificates = vec![self.at("certs/a.pem")];
            watch.follow(&self.at("rules"), &self.at("tokenizers"), certificates, watch.debounce);
            // What was written just before the watch was made may or may not count as a change.
            while tokio::time::timeout(Duration::from_millis(400), watch.next()).await.is_ok() {}
            watch
        }
    }

    async fn changes(watch: &mut Watch) -> ReloadRequest {
        tokio::time::timeout(DEADLINE, watch.next()).await.expect("the change is not seen")
    }

    type Change = fn(&Files);
    const CHANGES: &[(&str, Change)] = &[
        ("gateway.toml is written", |f| f.write("gateway.toml", "2")),
        ("a rule is written", |f| f.write("rules/a.toml", "2")),
        ("a rule is replaced", |f| f.replace("rules/a.toml", "2")),
        ("a rule is added", |f| f.write("rules/b.toml", "2")),
        ("a rule is removed", |f| fs::remove_file(f.at("rules/a.toml")).unwrap()),
        ("a certificate is written", |f| f.write("certs/a.pem", "2")),
        ("a certificate is gone", |f| fs::remove_file(f.at("certs/a.pem")).unwrap()),
        ("a tokenizer is replaced", |f| f.replace("tokenizers/m/tokenizer.json", "2")),
        ("a model is staged", |f| {
            fs::create_dir(f.at("tokenizers/n")).unwrap();
            f.write("tokenizers/n/tokenizer.json", "1");
        }),
        ("the folder of rules is made anew", |f| {
            fs::remove_dir_all(f.at("rules")).unwrap();
            fs::create_dir(f.at("rules")).unwrap();
            f.write("rules/a.toml", "1");
        }),
    ];

    #[tokio::test]
    async fn events_tell_of_every_change() {
        for (what, change) in CHANGES {
            let files = Files::new();
            let mut watch = files.watch(true).await;
            change(&files);
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "{what}");
        }
    }

    #[tokio::test]
    async fn without_events_the_poll_finds_every_change() {
        for (what, change) in CHANGES {
            let files = Files::new();
            let mut watch = files.watch(false).await;
            change(&files);
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "{what}");
        }
    }

    /// Between two looks a rule comes, is read, and goes: the files are as they were, and what is in force is not.
    #[tokio::test]
    async fn a_rule_that_was_read_and_is_gone_asks_for_another_reading() {
        for events in [true, false] {
            let files = Files::new();
            let mut watch = files.watch(events).await;
            files.write("rules/a.toml", "2");
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files);
            files.write("rules/b.toml", "1");
            // it is read
            let (rules, tokenizers, debounce) = (files.at("rules"), files.at("tokenizers"), watch.debounce);
            let certificates = vec![files.at("certs/a.pem")];
            watch.follow(&rules, &tokenizers, certificates.clone(), debounce);
            fs::remove_file(files.at("rules/b.toml")).unwrap();
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "events: {events}");
            watch.follow(&rules, &tokenizers, certificates.clone(), debounce);
            let more = tokio::time::timeout(4 * debounce, watch.next()).await;
            assert!(more.is_err(), "once is enough: {more:?}");
        }
    }

    #[tokio::test]
    async fn a_folder_made_anew_is_watched_again() {
        let files = Files::new();
        let mut watch = files.watch(true).await;
        for round in 0..3 {
            fs::remove_dir_all(files.at("rules")).unwrap();
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "removed in round {round}");
            fs::create_dir(files.at("rules")).unwrap();
            files.write("rules/a.toml", &format!("{round}"));
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "made in round {round}");
            files.write("rules/a.toml", "written");
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "written in round {round}");
        }
    }

    /// As the kubelet does it: files are links into `..data`, which is a link to a folder and is swapped.
    #[tokio::test]
    async fn a_config_map_is_swapped() {
        let files = Files::new();
        fs::remove_file(files.at("rules/a.toml")).unwrap();
        fs::create_dir(files.at("rules/..1")).unwrap();
        files.write("rules/..1/a.toml", "1");
        symlink("..1", files.at("rules/..data")).unwrap();
        symlink("..data/a.toml", files.at("rules/a.toml")).unwrap();
        let mut watch = files.watch(true).await;
        for version in 2..5 {
            fs::create_dir(files.at(&format!("rules/..{version}"))).unwrap();
            files.write(&format!("rules/..{version}/a.toml"), "1");
            symlink(format!("..{version}"), files.at("rules/..data_tmp")).unwrap();
            fs::rename(files.at("rules/..data_tmp"), files.at("rules/..data")).unwrap();
            fs::remove_dir_all(files.at(&format!("rules/..{}", version - 1))).unwrap();
            assert_eq!(changes(&mut watch).await, ReloadRequest::Files, "version {version}");
        }
    }

    /// Time stands still but for the watch's own waits, so that "no request" takes none.
    #[tokio::test(start_paused = true)]
    async fn what_does_not_matter_asks_for_nothing() {
        let files = Files::new();
        let mut watch = files.watch(false).await;
        files.write("other.log", "1");
        files.write("rules/README", "1");
        files.write("rules/.a.toml.swp", "1");
        files.write("rules/.a.toml", "1");
        assert!(tokio::time::timeout(Duration::from_secs(60), watch.next()).await.is_err());
        files.write("rules/a.toml", "changed");
        assert_eq!(watch.next().await, ReloadRequest::Files);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_and_signals_are_read_once_when_all_is_quiet() {
        let files = Files::new();
        let mut watch = files.watch(false).await;
        watch.poll = Duration::from_secs(3600);
        watch.next_poll = Instant::now() + watch.poll;
        let began = Instant::now();
        for round in 0..5 {
            files.write("rules/a.toml", &"x".repeat(round));
            watch.delay(round == 2);
            let early = tokio::time::timeout(Duration::from_millis(40), watch.next()).await;
            assert!(early.is_err(), "read in round {round}, while files change");
        }
        assert_eq!(watch.next().await, ReloadRequest::Signal);
        assert!(began.elapsed() >= Duration::from_millis(4 * 40 + 50));
        assert!(tokio::time::timeout(Duration::from_secs(60), watch.next()).await.is_err(), "read twice");
    }

    #[tokio::test(start_paused = true)]
    async fn changes_without_end_are_read_all_the_same() {
        let files = Files::new();
        let mut watch = files.watch(false).await;
        watch.poll = Duration::from_secs(3600);
        watch.next_poll = Instant::now() + watch.poll;
        let read = async {
            let mut round = 0;
            loop {
                round += 1;
                files.write("rules/a.toml", &"x".repeat(round));
                watch.delay(false);
                if tokio::time::timeout(Duration::from_millis(40), watch.next()).await.is_ok() {
                    return round;
                }
            }
        };
        let rounds = tokio::time::timeout(DEADLINE, read).await.expect("never read");
        assert!((10..=14).contains(&rounds), "{rounds} rounds of 40 ms, ten debounces of 50 ms");
    }

    #[tokio::test(start_paused = true)]
    async fn other_folders_are_followed() {
        let files = Files::new();
        let mut watch = files.watch(false).await;
        fs::create_dir(files.at("more")).unwrap();
        files.write("more/a.toml", "1");
        watch.follow(&files.at("more"), &files.at("tokenizers"), Vec::new(), watch.debounce);
        assert_eq!(watch.next().await, ReloadRequest::Files, "changed after the last request");
        files.write("rules/a.toml", "of no interest any more");
        assert!(tokio::time::timeout(Duration::from_secs(60), watch.next()).await.is_err());
        files.write("more/a.toml", "changed");
        assert_eq!(watch.next().await, ReloadRequest::Files);
    }
}
