//! The processes that descend from this one.

use std::{collections::HashMap, fs};

use rustix::process::{Pid, getpid};

/// All descendants of this process that are visible at this moment.
///
/// A process that forks meanwhile may hide its child from one scan; since this process is the subreaper of the tree,
/// the next scan finds the child.
pub(super) fn descendants() -> Vec<Pid> {
    let mut children: HashMap<Pid, Vec<Pid>> = HashMap::new();
    for (pid, parent) in processes() {
        children.entry(parent).or_default().push(pid);
    }
    let mut found = children.remove(&getpid()).unwrap_or_default();
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        found.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    found
}

/// Every process of the system and its parent.
fn processes() -> impl Iterator<Item = (Pid, Pid)> {
    fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| {
        let pid = parse(entry.ok()?.file_name().to_str()?)?;
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
        Some((pid, parent(&stat)?))
    })
}

/// The parent in a line such as `42 (name) S 1 …`. The name may contain spaces and brackets.
fn parent(stat: &str) -> Option<Pid> {
    parse(stat.rsplit_once(')')?.1.split_whitespace().nth(1)?)
}

fn parse(pid: &str) -> Option<Pid> {
    Pid::from_raw(pid.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processes_name_cannot_forge_its_parent() {
        assert_eq!(parent("42 (sh) S 7 42 42"), Pid::from_raw(7));
        assert_eq!(parent("42 (a) S 1 (b) R 7 42 42"), Pid::from_raw(7));
        assert_eq!(parent("1 (init) S 0 1 1"), None);
        assert_eq!(parent(""), None);
    }
}
