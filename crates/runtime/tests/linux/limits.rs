//! The limits of a sandbox, as the kernel has them.

use std::fs;

use runtime::container::ContainerDriver;
use runtime::driver::Driver as _;

use super::{agent_pid, disk_of, id, processes, start};

pub(crate) fn is_limited(container: &ContainerDriver) {
    let id = id("ione");
    let started = start(container, &id);
    let pid = agent_pid(&started.sandbox);
    let own = format!("/ione.0.{}", disk_of(&id));
    let group = |pid: i32, what: &str| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let line = groups.lines().find(|line| line.split(':').nth(1) == Some(what));
        line.or_else(|| groups.lines().find(|line| line.starts_with("0::")))
            .unwrap()
            .to_owned()
    };
    let spawner = processes(pid).into_iter().find(|other| *other != pid).unwrap();
    for controller in ["memory", "pids", "cpu"] {
        let (of_spawner, of_agent) = (group(spawner, controller), group(pid, controller));
        assert!(of_spawner.ends_with(&format!("{own}/work")), "{of_spawner}");
        // Version 1 holds the agent in the sandbox's own group.
        let agents = ["", "/agent"]
            .iter()
            .any(|end| of_agent.ends_with(&format!("{own}{end}")));
        assert!(agents, "{of_agent}");
    }
    let value = |above: &str, controller: &str, files: [&str; 2]| {
        let path = group(spawner, controller).splitn(3, ':').nth(2).unwrap().to_owned();
        let path = format!("{path}{above}");
        let roots = [format!("/sys/fs/cgroup/{controller}"), "/sys/fs/cgroup".to_owned()];
        let read = |root: &String, file: &str| fs::read_to_string(format!("{root}{path}/{file}")).ok();
        let text = roots.iter().zip(files).find_map(|(root, file)| read(root, file));
        text.unwrap().trim().to_owned()
    };
    let limits = |above: &str| {
        let number = |text: String| text.split(' ').next().unwrap().parse::<u64>().unwrap();
        [
            number(value(above, "memory", ["memory.limit_in_bytes", "memory.max"])),
            number(value(above, "pids", ["pids.max", "pids.max"])),
            number(value(above, "cpu", ["cpu.cfs_quota_us", "cpu.max"])),
        ]
    };
    let (work, whole) = (limits(""), limits("/.."));
    assert_eq!(work, [64 << 20, 20, 100_000]);
    let margin: Vec<u64> = whole.iter().zip(work).map(|(whole, work)| whole - work).collect();
    assert_eq!(margin, [64 << 20, 16, 20_000]);
    // While it is started, it is preferred to others.
    let weight = || {
        value("/..", "cpu", ["cpu.shares", "cpu.weight"])
            .parse::<u64>()
            .unwrap()
    };
    let starting = weight();
    started.sandbox.settle().unwrap();
    assert!([1024, 100].contains(&weight()), "{}", weight());
    assert_eq!(starting, 50 * weight());
    // The processor time of the workload can be lowered for some time, and a later driver sets it back.
    started.sandbox.limit_cpu(Some(200)).unwrap();
    assert_eq!((limits("")[2], limits("/..")[2]), (20_000, 120_000));
    started.sandbox.limit_cpu(Some(5000)).unwrap();
    assert_eq!(limits("")[2], 100_000);
    started.sandbox.limit_cpu(Some(0)).unwrap();
    assert_eq!(limits("")[2], 1000);
    let again = container.find().unwrap().pop().unwrap().alive.unwrap();
    again.limit_cpu(None).unwrap();
    assert_eq!([limits(""), limits("/..")], [work, whole]);
}
