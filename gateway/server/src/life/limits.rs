//! What the system lets the process have: descriptors and memory.

use std::path::Path;

use kvgate_core::schema::show_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are not for clients in any case: listeners, files, the runtime's own.
const BESIDE: u64 = 32;
/// Fewer clients than these are not worth running for.
const LEAST: u64 = 16;

fn shown(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_owned(), |n| n.to_string())
}

/// Raises the number of descriptors as far as it may be.
pub fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.current != limit.maximum
        && let Err(e) = setrlimit(Resource::Nofile, wanted)
    {
        tracing::warn!("the limit of open files stays at {}: {e}", shown(limit.current));
    }
    tracing::info!(open_files = shown(getrlimit(Resource::Nofile).current), "limits");
}

/// The connections of clients that are let in, of `wanted`: no more than leave every other descriptor for engines.
pub fn connections(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let most = limit.map_or(wanted, most);
    if most < wanted {
        tracing::warn!(
            "{most} connections of clients are let in instead of {wanted}: half of the files that may be open, since each \
             may need one more to an engine. Raise the limit (LimitNOFILE=, ulimit -Hn)"
        );
    }
    most.min(wanted)
}

fn most(files: u64) -> usize {
    usize::try_from((files / 2).saturating_sub(BESIDE).max(LEAST)).unwrap_or(usize::MAX)
}

/// The memory that request bodies may take up, of `wanted`: no more than a quarter of what the process may have. A body
/// is held more than once while it is read and sent.
pub fn body_memory(wanted: u64) -> u64 {
    let Some(memory) = memory(Path::new("/")) else { return wanted };
    let most = (memory / 4).max(1 << 20);
    if most < wanted {
        tracing::warn!(
            "request bodies share {} instead of `server.body_memory`, a quarter of the {} that the process may have",
            show_size(most),
            show_size(memory)
        );
    }
    most.min(wanted)
}

/// The memory that the process may have: the least of the limits of its control groups, its own, and the machine.
fn memory(root: &Path) -> Option<u64> {
    let own = [Resource::As, Resource::Data].into_iter().filter_map(|limit| getrlimit(limit).current);
    own.chain(groups(root)).chain(machine(root)).min()
}

/// The limits of the control groups that the process is in, and of those above.
fn groups(root: &Path) -> Vec<u64> {
    let mut limits = Vec::new();
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            "memory" => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        // in a container the path is the host's, and what is mounted is the group itself
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let text = std::fs::read_to_string(root.join(mount).join(group).join(file)).unwrap_or_default();
            limits.extend(text.trim().parse::<u64>());
        }
    }
    limits
}

/// What the machine has.
fn machine(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }

    #[test]
    fn engines_have_a_descriptor_for_every_client() {
        assert_eq!([10, 256, 1024, 65_536].map(most), [16, 96, 480, 32_736]);
        assert_eq!(connections(1), 1);
    }

    #[test]
    fn the_least_limit_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert!(groups(root).is_empty() && machine(root).is_none(), "nothing can be read");
        write(root, "proc/meminfo", "MemTotal:        2097152 kB\nMemFree: 1 kB\n");
        assert_eq!(machine(root), Some(2 << 30));
        write(root, "proc/self/cgroup", "0::/a/b\n");
        write(root, "sys/fs/cgroup/a/b/memory.max", "max\n");
        assert!(groups(root).is_empty());
        write(root, "sys/fs/cgroup/a/memory.max", "268435456\n");
        assert_eq!(groups(root), [256 << 20]);
        // the first version of control groups, seen from inside a container
        write(root, "proc/self/cgroup", "9:memory:/host/path\n3:cpu,cpuacct:/x\n");
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "134217728\n");
        assert_eq!(groups(root), [128 << 20]);
    }
}
