use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use model::resources::Resources;

use super::backend::Backend;
use super::limits::Limits;
use super::open::OpenTree;
use super::tree::Tree;
use crate::slot::Name;

const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

fn v1(controllers: &str) -> String {
    format!("31 23 0:27 / /sys/fs/cgroup/{controllers} rw - cgroup cgroup rw,{controllers}")
}

fn detect(lines: &[&str], controllers: &str) -> Result<Backend, String> {
    Backend::from_mountinfo(&lines.join("\n"), |_| controllers.to_owned())
}

#[test]
fn the_back_end_is_detected_from_the_mounts() {
    assert_eq!(
        detect(&[V2], "cpuset cpu io memory pids"),
        Ok(Backend::V2("/sys/fs/cgroup".into()))
    );
    let (memory, pids, cpu) = (v1("memory"), v1("pids"), v1("cpu,cpuacct"));
    assert_eq!(
        detect(&[UNIFIED, &memory, &pids, &cpu], "hugetlb"),
        Ok(Backend::Hybrid(
            "/sys/fs/cgroup/unified".into(),
            [
                "/sys/fs/cgroup/memory".into(),
                "/sys/fs/cgroup/pids".into(),
                "/sys/fs/cgroup/cpu,cpuacct".into()
            ]
        ))
    );
    let missing = detect(&[UNIFIED, &memory, &cpu], "hugetlb").unwrap_err();
    assert!(missing.ends_with(": pids"), "{missing}");
    assert!(detect(&[&memory, &pids, &cpu], "").is_err());
    assert!(detect(&[V2], "cpu").unwrap_err().contains("memory, pids"));
    assert!(detect(&[], "").is_err());
}

#[test]
fn groups_of_both_layouts_are_removed_from_the_leaves_up() {
    let paths = ["/v2".into(), "/m".into(), "/p".into(), "/c".into()];
    let [unified, memory, pids, cpu]: [PathBuf; 4] = paths;
    let tree = Tree::new(Backend::Hybrid(unified, [memory, pids, cpu]), 1);
    let name = Name::parse("iabc.3").unwrap();
    let groups = tree.groups(&name);
    for root in ["/v2", "/m", "/p", "/c"] {
        let root = Path::new(root).join("ringfence-0000000000000001");
        for group in ["iabc.3", "iabc.3/agent", "iabc.3/work", "iabc.3.agent", "iabc.3.work"] {
            assert!(groups.contains(&root.join(group)), "{groups:?}");
        }
    }
    for (index, group) in groups.iter().enumerate() {
        let below = groups[index + 1..].iter().find(|later| later.starts_with(group));
        assert_eq!(below, None, "{group:?} goes before what is in it");
    }
    let record = Path::new("/v2/ringfence-0000000000000001/iabc.3");
    assert_eq!(groups.last().map(PathBuf::as_path), Some(record));
}

#[test]
fn the_limits_of_the_sandbox_include_a_margin() {
    let work = Limits::of(&Resources::default());
    let whole = work.with_margin();
    assert!(whole.memory > work.memory && whole.pids > work.pids && whole.cpu_us > work.cpu_us);
}

#[test]
fn without_cgroups_a_directory_is_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let tree = Tree::new(Backend::None(dir.path().join("run")), 7);
    tree.create().unwrap();
    let name = Name::parse("iabc.3").unwrap();
    let open = OpenTree::open(&tree, false).unwrap();
    open.create(&name, &Resources::default()).unwrap();
    open.create_work(&name, &Resources::default()).unwrap();
    assert!(open.open_work(&name).unwrap().birth.is_none());
    assert_eq!(tree.agent_pid(&name), None);
    // This test acts as the agent.
    let own = std::process::id().cast_signed();
    open.record_agent(&name, own, "/proc/self/exe").unwrap();
    assert_eq!(tree.agent_pid(&name), Some(own));
    assert_eq!(tree.names().unwrap(), std::slice::from_ref(&name));
    assert!(!tree.remove_groups(&name), "its agent is running");
    let mut agent = Command::new("sleep").arg("600").spawn().unwrap();
    open.record_agent(&name, agent.id().cast_signed(), "/bin/sleep")
        .unwrap();
    tree.kill(&name);
    assert_eq!(agent.wait().unwrap().signal(), Some(9));
    assert!(tree.remove_groups(&name));
    assert_eq!(tree.names().unwrap(), []);

    // The earlier layout: two separate groups.
    let old = Name::parse("iold.4").unwrap();
    let side = |role: &str| dir.path().join("run").join(format!("{old}.{role}"));
    for role in ["agent", "work"] {
        fs::create_dir(side(role)).unwrap();
    }
    // A pid alone is not accepted: after a reboot it may be any process.
    let mut innocent = Command::new("sleep").arg("600").spawn().unwrap();
    fs::write(side("agent").join("cgroup.procs"), innocent.id().to_string()).unwrap();
    assert_eq!(tree.agent_pid(&old), None);
    tree.kill(&old);
    assert_eq!(tree.names().unwrap(), std::slice::from_ref(&old));
    assert!(tree.remove_groups(&old));
    assert!(innocent.try_wait().unwrap().is_none(), "it was not killed");
    innocent.kill().unwrap();
    innocent.wait().unwrap();
    assert!(!side("agent").exists() && !side("work").exists());
    assert_eq!(tree.names().unwrap(), []);
    tree.remove();
    assert!(!dir.path().join("run").exists());
}
