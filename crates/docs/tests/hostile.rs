//! Commands made of what attackers try do nothing but answer, in bounded processor time.

use std::time::Duration;

use docs::command::{self, COMMAND_MAX_BYTES, OUTPUT_MAX_BYTES};

/// Processor time of all commands together, at most: 0.4 s were measured, without optimisation of this crate.
const ALL: Duration = Duration::from_secs(5);

const PARTS: &[&str] = &[
    "rg",
    "cat",
    "ls",
    "tree",
    "head",
    "-C",
    "-L",
    "-n",
    "-e",
    "--",
    "-",
    "..",
    "/../../etc/passwd",
    "/proc/self/environ",
    "*",
    "?",
    "[a-z]",
    "{a,b}",
    "|",
    "||",
    "&&",
    ";",
    ">",
    ">>",
    "<",
    "<<",
    "$(id)",
    "`id`",
    "$HOME",
    "${x}",
    "~root",
    "'",
    "\"",
    "\\",
    "\n",
    "\r\n",
    "\t",
    "\u{0}",
    "\u{1b}[2J",
    "\u{202e}",
    "\u{feff}",
    "é",
    "\u{10ffff}",
    "(a+)+$",
    "(a|a)*b",
    r"\w{1000}",
    "a{1000}{1000}",
    "((((((((((",
    "(?R)",
    r"(a)\1",
    "(?=x)",
    "[[:alpha:]",
    r"\p{Greek}{500}",
    "-99999999999999999999",
    "999999999999",
    "--pre=/bin/sh",
    "--follow",
    "-uuu",
    "--config",
    "/dev/zero",
    "file:///etc/passwd",
    "%2e%2e%2f",
    "....//",
    "/./././",
    "//",
    "(?i)(a|b|c|d|e|f|g){0,60}z",
    r"(\w+\s+){50}x",
    r"(.*)(.*)(.*)(.*)(.*)\d$",
];

/// A generator of numbers with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % most
    }
}

/// The processor time of this thread, as the kernel counts it. A clock on the wall would also count what other tests do.
fn processor_time() -> Duration {
    let counted = std::fs::read_to_string("/proc/thread-self/schedstat").expect("the kernel counts");
    let ns = counted.split_whitespace().next().expect("time on a processor");
    Duration::from_nanos(ns.parse().expect("a number"))
}

#[test]
fn a_thousand_hostile_commands_do_nothing_but_answer() {
    let mut random = Random(20_261_122);
    let (mut slowest, mut refused) = (Duration::ZERO, 0);
    let begun = processor_time();
    for n in 0..1000 {
        let mut command = String::new();
        for _ in 0..=random.below(6) {
            let part = PARTS[random.below(PARTS.len())];
            let times = if random.below(8) == 0 { random.below(400) } else { 1 };
            command.push_str(&part.repeat(times));
            if random.below(4) > 0 {
                command.push(' ');
            }
        }
        if n % 4 == 0 {
            command = format!("rg '{}' /", command.replace('\'', ""));
        }
        let used = processor_time();
        let answer = command::run(&command, &|| false);
        slowest = slowest.max(processor_time() - used);
        match answer {
            Ok(text) => {
                assert!(
                    text.len() <= OUTPUT_MAX_BYTES + 1024,
                    "{command:?}: {} bytes",
                    text.len()
                );
                assert!(!text.contains("root:x:0:0"), "{command:?}");
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < COMMAND_MAX_BYTES, "{command:?}: {error}");
            }
        }
    }
    let all = processor_time() - begun;
    eprintln!("all {all:?}, slowest {slowest:?}, {refused} refused");
    assert!(refused > 300, "{refused}");
    assert!(all < ALL, "{all:?}, the slowest {slowest:?}");
}
