//! Commands of Dockerfiles: programs with their arguments, and what of them is run from the start on.

use dockerfile::Command;

/// The shell of commands, unless the Dockerfile names another one.
pub(super) const SHELL: [&str; 2] = ["/bin/sh", "-c"];
/// Runs the script `$1` with the interpreter that it names.
const SCRIPT: &str = r#"file=$(mktemp) && printf %s "$1" > "$file" && chmod 700 "$file" || exit
"$file"; code=$?
rm -f "$file"
exit $code"#;

/// The program of a command with its arguments. A text is for the shell.
pub(super) fn args_of(shell: &[String], command: &Command) -> Vec<String> {
    match command {
        Command::Exec(args) => args.clone(),
        Command::Shell(text) if text.trim().is_empty() => Vec::new(),
        Command::Shell(text) => shell.iter().cloned().chain([text.clone()]).collect(),
        Command::Script(text) => {
            let shell = SHELL.map(str::to_owned).into_iter();
            shell
                .chain([SCRIPT.to_owned(), "sh".to_owned(), text.clone()])
                .collect()
        }
    }
}

/// What the sandboxes of a stage run from their start on, by the rules of Docker for ENTRYPOINT and CMD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Startup {
    entrypoint: Vec<String>,
    cmd: Vec<String>,
    /// Whether the stage itself has a CMD, and not only the one that it begins with.
    has_own_cmd: bool,
    /// Whether any instruction says what is run.
    is_wanted: bool,
}

impl Startup {
    /// Startup of a stage that begins with an image. The image alone starts nothing: its entry point counts once the
    /// Dockerfile has a command for it.
    pub(super) fn of_image(entrypoint: &[String]) -> Self {
        Self {
            entrypoint: entrypoint.to_vec(),
            ..Self::default()
        }
    }

    /// Startup of a stage that begins with the stage of this one.
    pub(super) fn inherited(&self) -> Self {
        Self {
            has_own_cmd: false,
            ..self.clone()
        }
    }

    pub(super) fn set_cmd(&mut self, args: Vec<String>) {
        self.cmd = args;
        self.has_own_cmd = true;
        self.is_wanted = true;
    }

    pub(super) fn set_entrypoint(&mut self, args: Vec<String>) {
        self.entrypoint = args;
        self.is_wanted = true;
        // The command of what the stage begins with was for another entry point.
        if !self.has_own_cmd {
            self.cmd.clear();
        }
    }

    /// The entry point with the command as its arguments; none if nothing is run. Those of an entry point that is a text
    /// are arguments of its shell, which nothing sees that does not ask for them.
    pub(super) fn args(&self) -> Option<Vec<String>> {
        let args: Vec<String> = self.entrypoint.iter().chain(&self.cmd).cloned().collect();
        let is_empty = args.iter().all(|arg| arg.trim().is_empty());
        (self.is_wanted && !is_empty).then_some(args)
    }

    /// Whether an image has an entry point that nothing makes use of.
    pub(super) fn ignores_image(&self) -> bool {
        !self.is_wanted && !self.entrypoint.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ')
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect()
    }

    /// The arguments, separated by `|`, of instructions above an image. `FROM` begins a stage on the one before.
    fn started(image: &str, instructions: &[(&str, Command)]) -> Option<String> {
        let mut startup = Startup::of_image(&words(image));
        let shell = SHELL.map(str::to_owned);
        for (keyword, command) in instructions {
            match *keyword {
                "CMD" => startup.set_cmd(args_of(&shell, command)),
                "ENTRYPOINT" => startup.set_entrypoint(args_of(&shell, command)),
                _ => startup = startup.inherited(),
            }
        }
        startup.args().map(|args| args.join("|"))
    }

    #[test]
    fn entry_points_and_commands_are_joined_as_docker_does() {
        let exec = |text| Command::Exec(words(text));
        let shell = |text: &str| Command::Shell(text.to_owned());
        let from = || ("FROM", exec(""));
        for (image, instructions, want) in [
            (
                "",
                vec![("ENTRYPOINT", exec("a b")), ("CMD", exec("c d"))],
                Some("a|b|c|d"),
            ),
            (
                "",
                vec![("CMD", exec("c d")), ("ENTRYPOINT", exec("a b"))],
                Some("a|b|c|d"),
            ),
            (
                "",
                vec![("ENTRYPOINT", exec("a")), ("CMD", shell("c $d"))],
                Some("a|/bin/sh|-c|c $d"),
            ),
            // What a shell gets behind its text is for `$0` and `$@`.
            (
                "",
                vec![("ENTRYPOINT", shell("a $b")), ("CMD", exec("c"))],
                Some("/bin/sh|-c|a $b|c"),
            ),
            (
                "",
                vec![("ENTRYPOINT", shell("a")), ("CMD", shell("c"))],
                Some("/bin/sh|-c|a|/bin/sh|-c|c"),
            ),
            ("", vec![("ENTRYPOINT", exec("a"))], Some("a")),
            (
                "",
                vec![("CMD", exec("a")), ("CMD", shell("c d"))],
                Some("/bin/sh|-c|c d"),
            ),
            (
                "",
                vec![("ENTRYPOINT", exec("a")), ("ENTRYPOINT", exec("")), ("CMD", exec("c"))],
                Some("c"),
            ),
            ("", vec![("CMD", exec(""))], None),
            ("", vec![], None),
            // The entry point of an image.
            ("entry", vec![], None),
            ("entry", vec![("CMD", exec("c"))], Some("entry|c")),
            ("entry", vec![("ENTRYPOINT", exec("")), ("CMD", exec("c"))], Some("c")),
            ("entry", vec![("ENTRYPOINT", exec("a"))], Some("a")),
            // A stage on another one: a new entry point is not for the command of that.
            (
                "",
                vec![("CMD", exec("c")), from(), ("ENTRYPOINT", exec("a"))],
                Some("a"),
            ),
            (
                "",
                vec![
                    ("ENTRYPOINT", exec("a")),
                    ("CMD", exec("c")),
                    from(),
                    ("CMD", exec("d")),
                ],
                Some("a|d"),
            ),
            (
                "",
                vec![("ENTRYPOINT", exec("a")), ("CMD", exec("c")), from()],
                Some("a|c"),
            ),
        ] {
            assert_eq!(
                started(image, &instructions).as_deref(),
                want,
                "{image}: {instructions:?}"
            );
        }
        assert!(Startup::of_image(&words("entry")).ignores_image());
        assert!(!Startup::of_image(&[]).ignores_image());
    }
}
