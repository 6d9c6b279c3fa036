//! The one word of a command line that may be reported.
//!
//! Arguments carry secrets, and so do scripts for a shell (`TOKEN=… tool`, `curl -H 'Authorization: …'`). What is
//! reported is the name of the program. SDKs run everything through a shell, so of a script it is the name of its first
//! command, if the script begins with one that can be told from anything else without understanding the shell.

use protocol::process::ProcessConfig;

/// Programs that take a script after `-c`.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ash", "zsh", "ksh"];
/// Longest name that is reported, in bytes; a longer one is not a program's.
const NAME_MAX: usize = 64;

/// The name of the program that a request is for.
pub(super) fn name(config: &ProcessConfig) -> &str {
    let program = file_name(&config.cmd).unwrap_or("?");
    if SHELLS.contains(&program)
        && let Some(script) = script(&config.args)
        && let Some(first) = first_command(script)
    {
        return first;
    }
    program
}

/// What a shell gets with `-c`, alone or among other letters.
fn script(arguments: &[String]) -> Option<&str> {
    let mut arguments = arguments.iter();
    let is_c = |argument: &String| {
        let letters = argument.strip_prefix('-')?;
        (!letters.starts_with('-')).then(|| letters.contains('c'))
    };
    // Up to the first argument that is not an option.
    while let Some(has_c) = arguments.next().and_then(is_c) {
        if has_c {
            return arguments.next().map(String::as_str);
        }
    }
    None
}

/// The first word of a script, if nothing in it or right behind it gives it another meaning.
fn first_command(script: &str) -> Option<&str> {
    let script = script.trim_start();
    let end = script.find([' ', '\t', '\n', ';', '&', '|', '<', '>', ')']);
    file_name(&script[..end.unwrap_or(script.len())])
}

/// The last part of a path, if it looks like the name of a program.
fn file_name(path: &str) -> Option<&str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._+-".contains(&byte);
    let name = path.rsplit('/').next().unwrap_or_default();
    (path.bytes().all(plain) && (1..=NAME_MAX).contains(&name.len())).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_a_name_is_told() {
        let check = |cmd: &str, args: &[&str], expected: &str| {
            let config = ProcessConfig {
                cmd: cmd.to_owned(),
                args: args.iter().map(|argument| (*argument).to_owned()).collect(),
                ..ProcessConfig::default()
            };
            assert_eq!(name(&config), expected, "{cmd} {args:?}");
        };
        check("/usr/bin/python3.11", &["-c", "import os"], "python3.11");
        check(
            "/bin/bash",
            &["-l", "-c", "curl -H 'Authorization: x' http://h"],
            "curl",
        );
        check("bash", &["-lc", "  /opt/x/run.sh; secret"], "run.sh");
        check("sh", &["-c", "true"], "true");
        check("sh", &["-c", "ls|wc"], "ls");
        // Assignments, quotes and expansions may hold anything.
        for script in [
            "TOKEN=abc tool",
            "TOKEN='a b' tool",
            "'my secret' x",
            "$SECRET x",
            "my\\ secret",
            "`x`",
            "{ a; }",
            "(a)",
            "",
            "//",
        ] {
            check("/bin/sh", &["-c", script], "sh");
        }
        check("/bin/sh", &["script.sh", "-c", "secret"], "sh");
        check("/bin/sh", &["--rcfile", "-c", "secret"], "sh");
        check("/bin/sh", &["-c"], "sh");
        check("/bin/sh", &[], "sh");
        check("sh", &["-c", &"x".repeat(NAME_MAX)], &"x".repeat(NAME_MAX));
        check("sh", &["-c", &"x".repeat(NAME_MAX + 1)], "sh");
        check("a b", &[], "?");
        check("", &[], "?");
        check("/bin/", &[], "?");
    }
}
