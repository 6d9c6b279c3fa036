//! What is mounted in a sandbox that was started.

use std::fs;

use model::resources::Resources;
use runtime::container::ContainerDriver;
use runtime::driver::Driver;
use testkit::mounts::differences;

use super::{RESOURCES, agent_pid, end, id, request};

/// What is mounted in a sandbox.
const LIST: &str = include_str!("../mounts.txt");

/// With as many processors as the host has, and with one.
pub(super) fn are_those_of_the_list(container: &ContainerDriver) {
    for (id, cpu_count) in [(id("ione"), 1), (id("itwo"), 1024)] {
        let mut request = request(&id);
        request.resources = Resources { cpu_count, ..RESOURCES };
        let started = container.start(&request).unwrap();
        let pid = agent_pid(&started.sandbox);
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        assert_eq!(differences(LIST, &mounts), [""; 0], "{mounts}");
        end(&started.sandbox);
    }
}
