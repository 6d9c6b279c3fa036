//! Instructions of a Dockerfile, checked as far as that is possible before anything runs.

use crate::expand::Escape;
use crate::lines::{Heredoc, Line, split};
use crate::note::Note;
use crate::refusal::Refusal;
use crate::words::{flags, json, quoted, shell_quoted};

/// A parsed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The character that escapes others.
    pub escape: Escape,
    /// The instructions.
    pub instructions: Vec<Instruction>,
    /// What has no effect.
    pub notes: Vec<Note>,
}

/// An instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Line at which the instruction begins, from 1.
    pub line: usize,
    /// Text of the instruction in the file, without continuations and heredocs.
    pub text: String,
    /// What the instruction does.
    pub kind: Kind,
}

/// What an instruction does. Texts that are not marked otherwise are words to expand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// `FROM`: a new stage.
    From {
        /// An image or a stage.
        image: String,
        /// Its name, in lower case.
        name: Option<String>,
        /// The platform.
        platform: Option<String>,
    },
    /// `RUN`.
    Run(Command),
    /// `COPY` or `ADD`.
    Copy(Copy),
    /// `ENV`: names and values.
    Env(Vec<(String, String)>),
    /// `ARG`.
    Arg(Vec<Argument>),
    /// `WORKDIR`.
    Workdir(String),
    /// `USER`.
    User(String),
    /// `SHELL`: the program and its arguments, not to be expanded.
    Shell(Vec<String>),
    /// `CMD`.
    Cmd(Command),
    /// `ENTRYPOINT`.
    Entrypoint(Command),
}

/// The command of an instruction. It is not expanded: that is for its shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A text for the shell, with its heredocs.
    Shell(String),
    /// A script with an interpreter of its own.
    Script(String),
    /// A program with its arguments.
    Exec(Vec<String>),
}

impl Command {
    /// The command as a text for the shell.
    #[must_use]
    pub fn to_shell(&self) -> String {
        match self {
            Self::Shell(text) | Self::Script(text) => text.clone(),
            Self::Exec(args) => {
                let args: Vec<String> = args.iter().map(|arg| shell_quoted(arg)).collect();
                args.join(" ")
            }
        }
    }
}

/// An argument of the build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argument {
    /// Name of the argument.
    pub name: String,
    /// Default value of the argument.
    pub default: Option<String>,
}

/// Files to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// A stage or an image that they come from, not to be expanded; none for the context.
    pub from: Option<String>,
    /// Owner of the copied files.
    pub chown: Option<String>,
    /// Mode of the copied files.
    pub chmod: Option<String>,
    /// What is copied.
    pub sources: Vec<Source>,
    /// Path to copy to.
    pub dest: String,
}

/// What is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A path or a pattern.
    Path(String),
    /// A file that is in the Dockerfile itself.
    File {
        /// Name of the file.
        name: String,
        /// Content of the file.
        content: String,
        /// Whether variables in the content are replaced.
        is_expanded: bool,
    },
}

/// Archives that `ADD` would unpack.
const ARCHIVES: [&str; 9] = [
    ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst",
];

impl Document {
    /// Parses a file.
    ///
    /// # Errors
    /// When it is malformed, or has what cannot be honoured.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        let (escape, lines) = split(text)?;
        let mut document = Self {
            escape,
            instructions: Vec::new(),
            notes: Vec::new(),
        };
        for line in lines {
            let mut notes = Vec::new();
            let parsed = Parser {
                line: &line,
                escape,
                notes: &mut notes,
            }
            .parse();
            let parsed = parsed.map_err(|message| Refusal::new(line.number, message))?;
            document.notes.extend(notes.into_iter().map(|message| Note {
                line: line.number,
                message,
            }));
            document.instructions.extend(parsed.map(|kind| Instruction {
                line: line.number,
                text: line.text,
                kind,
            }));
        }
        Ok(document)
    }
}

struct Parser<'a> {
    line: &'a Line,
    escape: Escape,
    notes: &'a mut Vec<String>,
}

impl Parser<'_> {
    /// Parses an instruction; none if it has no effect.
    fn parse(&mut self) -> Result<Option<Kind>, String> {
        let text = self.line.text.as_str();
        let end = text.find(char::is_whitespace).unwrap_or(text.len());
        let (keyword, rest) = (text[..end].to_ascii_uppercase(), text[end..].trim());
        let kind = match keyword.as_str() {
            "FROM" => self.from(rest)?,
            "RUN" => Kind::Run(self.run(rest)?),
            "COPY" => Kind::Copy(self.copy("COPY", rest)?),
            "ADD" => Kind::Copy(self.copy("ADD", rest)?),
            "ENV" => Kind::Env(self.env(rest)?),
            "ARG" => Kind::Arg(self.arg(rest)?),
            "WORKDIR" => Kind::Workdir(required(rest, "WORKDIR takes a path")?),
            "USER" => Kind::User(required(rest, "USER takes a name")?),
            "SHELL" => match json(rest) {
                Some(args) if !args.is_empty() => Kind::Shell(args),
                _ => return Err("SHELL takes a list in JSON, such as [\"/bin/bash\", \"-c\"]".to_owned()),
            },
            "CMD" => Kind::Cmd(command(rest)),
            "ENTRYPOINT" => Kind::Entrypoint(command(rest)),
            "LABEL" | "EXPOSE" | "VOLUME" | "HEALTHCHECK" | "STOPSIGNAL" | "MAINTAINER" => {
                self.notes.push(format!("{keyword} has no effect and is skipped"));
                return Ok(None);
            }
            "ONBUILD" => {
                return Err(
                    "ONBUILD is not supported: write its instruction in the Dockerfiles that build on this one"
                        .to_owned(),
                );
            }
            _ => {
                let shown: String = text[..end].chars().take(40).collect();
                return Err(format!("{shown:?} is not an instruction of Dockerfiles"));
            }
        };
        Ok(Some(kind))
    }

    fn from(&self, rest: &str) -> Result<Kind, String> {
        let (flags, rest) = flags(rest, self.escape);
        let mut platform = None;
        for (name, value) in flags {
            match (name, value) {
                ("platform", Some(value)) => platform = Some(value.to_owned()),
                _ => return Err(format!("FROM --{name} is not supported: leave it out")),
            }
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        let (image, name) = match words[..] {
            [image] => (image, None),
            [image, keyword, name] if keyword.eq_ignore_ascii_case("as") => (image, Some(name.to_ascii_lowercase())),
            _ => return Err("FROM takes an image, and optionally AS and a name".to_owned()),
        };
        if let Some(name) = &name {
            let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(is_part) {
                return Err(format!(
                    "{name:?} cannot be the name of a stage: use letters, digits, -, _ and ., beginning with a letter"
                ));
            }
        }
        Ok(Kind::From {
            image: image.to_owned(),
            name,
            platform,
        })
    }

    fn run(&mut self, rest: &str) -> Result<Command, String> {
        let (flags, rest) = flags(rest, self.escape);
        for (name, value) in flags {
            match (name, value) {
                ("mount", Some(value)) if mount_type(value) == "cache" => self.notes.push(
                    "RUN --mount=type=cache: the cache is not kept between builds; its directory is one of the image"
                        .to_owned(),
                ),
                ("mount", _) => {
                    return Err(
                        "RUN --mount is supported with type=cache only: copy files with COPY --from, and do not use secrets in a build"
                            .to_owned(),
                    );
                }
                ("network", Some("default")) | ("security", Some("sandbox")) => {}
                ("network", _) => {
                    return Err(
                        "RUN --network is not supported: the network rules of the team apply to builds".to_owned(),
                    );
                }
                _ => return Err(format!("RUN --{name} is not supported: leave it out")),
            }
        }
        if rest.is_empty() {
            return Err("RUN takes a command".to_owned());
        }
        if self.line.heredocs.is_empty() {
            return match command(rest) {
                Command::Exec(args) if args.is_empty() => Err("RUN takes a command".to_owned()),
                command => Ok(command),
            };
        }
        // Only a heredoc that nothing follows is the command itself. Otherwise the shell decides what it is for.
        if let ([heredoc], Some(_)) = (&self.line.heredocs[..], Heredoc::begin(rest)) {
            let content = heredoc.content();
            // A line that is indented names no interpreter, even where its tabs are left out: BuildKit has it so.
            return Ok(if heredoc.raw.starts_with("#!") {
                Command::Script(content)
            } else {
                Command::Shell(content)
            });
        }
        let mut text = rest.to_owned();
        for heredoc in &self.line.heredocs {
            text.push('\n');
            text.push_str(&heredoc.raw);
            text.push_str(&heredoc.name);
        }
        text.push('\n');
        Ok(Command::Shell(text))
    }

    fn copy(&mut self, keyword: &str, rest: &str) -> Result<Copy, String> {
        let (flags, rest) = flags(rest, self.escape);
        let (mut from, mut chown, mut chmod) = (None, None, None);
        for (name, value) in flags {
            let value = value.filter(|value| !value.is_empty()).map(str::to_owned);
            match (name, value) {
                ("from", Some(value)) if keyword == "COPY" => from = Some(value),
                ("chown", Some(value)) => chown = Some(value),
                ("chmod", Some(value)) => chmod = Some(value),
                // Every step is a layer of its own anyway.
                ("link", None) => {}
                ("link", Some(value)) if value == "true" || value == "false" => {}
                ("from" | "chown" | "chmod", None) => return Err(format!("{keyword} --{name} takes a value")),
                _ => return Err(format!("{keyword} --{name} is not supported: leave it out")),
            }
        }
        let mut words = match json(rest) {
            Some(words) => words,
            None => rest.split_whitespace().map(str::to_owned).collect(),
        };
        let dest = words.pop().filter(|dest| !dest.is_empty() && !words.is_empty());
        let dest = dest.ok_or_else(|| format!("{keyword} takes one or more sources and a destination"))?;
        if Heredoc::begin(&dest).is_some() {
            return Err(format!(
                "{keyword}: a heredoc is a source and cannot be the destination {dest}"
            ));
        }
        if words.iter().any(String::is_empty) {
            return Err(format!("{keyword}: a source is empty"));
        }
        let mut heredocs = self.line.heredocs.iter();
        let sources = words.into_iter().map(|word| match Heredoc::begin(&word) {
            None => self.path(keyword, word),
            Some(_) if from.is_some() => Err("COPY --from cannot copy heredocs".to_owned()),
            Some(_) => {
                let heredoc = heredocs.next().ok_or("a heredoc in a list in JSON has no text")?;
                if heredoc.name.contains('/') || heredoc.name == "." || heredoc.name == ".." {
                    return Err(format!("{:?} cannot be the name of a file", heredoc.name));
                }
                Ok(Source::File {
                    name: heredoc.name.clone(),
                    content: heredoc.content(),
                    is_expanded: heredoc.is_expanded,
                })
            }
        });
        let sources: Vec<Source> = sources.collect::<Result<_, String>>()?;
        if let Some(heredoc) = heredocs.next() {
            let why = "cannot be the name of a file that a heredoc becomes: leave out blanks";
            return Err(format!("{keyword}: {:?} {why}", heredoc.name));
        }
        if sources.len() > 1 && !dest.ends_with('/') && !dest.contains('$') && dest != "." {
            return Err(format!(
                "{keyword} with several sources takes a directory as its destination: write {dest}/"
            ));
        }
        Ok(Copy {
            from,
            chown,
            chmod,
            sources,
            dest,
        })
    }

    fn path(&self, keyword: &str, word: String) -> Result<Source, String> {
        if keyword == "ADD" {
            let lower = word.to_ascii_lowercase();
            let is_remote = lower.contains("://") || lower.starts_with("git@");
            if is_remote {
                return Err("ADD of an address is not supported: fetch it with RUN, or COPY a file".to_owned());
            }
            if ARCHIVES.iter().any(|end| lower.ends_with(end)) {
                return Err(format!(
                    "ADD does not unpack archives here: use COPY {word} and RUN tar -xf"
                ));
            }
        }
        Ok(Source::Path(word))
    }

    fn env(&self, rest: &str) -> Result<Vec<(String, String)>, String> {
        let words = quoted(rest, self.escape);
        let first = *words.first().ok_or("ENV takes names and values")?;
        if !first.contains('=') {
            let value = rest[first.len()..].trim_start();
            if value.is_empty() {
                return Err(format!("ENV {first} has no value: write {first}=value"));
            }
            return Ok(vec![(first.to_owned(), value.to_owned())]);
        }
        let pairs = words.into_iter().map(|word| match word.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
            _ => Err(format!(
                "ENV: {word:?} is not name=value; put values with blanks in quotes"
            )),
        });
        pairs.collect()
    }

    fn arg(&self, rest: &str) -> Result<Vec<Argument>, String> {
        let words = quoted(rest, self.escape);
        if words.is_empty() {
            return Err("ARG takes a name".to_owned());
        }
        let arguments = words.into_iter().map(|word| {
            let (name, default) = match word.split_once('=') {
                Some((name, default)) => (name, Some(default.to_owned())),
                None => (word, None),
            };
            let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            if is_name {
                Ok(Argument {
                    name: name.to_owned(),
                    default,
                })
            } else {
                Err(format!("ARG: {name:?} cannot be a name"))
            }
        });
        arguments.collect()
    }
}

fn required(text: &str, message: &str) -> Result<String, String> {
    if text.is_empty() {
        Err(message.to_owned())
    } else {
        Ok(text.to_owned())
    }
}

/// The type of a mount, which is `bind` by default.
fn mount_type(value: &str) -> &str {
    let mut parts = value.split(',');
    parts.find_map(|part| part.strip_prefix("type=")).unwrap_or("bind")
}

fn command(text: &str) -> Command {
    match json(text) {
        Some(args) => Command::Exec(args),
        None => Command::Shell(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Kind {
        let document = Document::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        document.instructions.into_iter().next().expect("an instruction").kind
    }

    fn pairs(pairs: &[(&str, &str)]) -> Kind {
        Kind::Env(pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect())
    }

    #[test]
    fn variables_have_two_forms() {
        assert_eq!(one("ENV a b  c"), pairs(&[("a", "b  c")]));
        assert_eq!(
            one("env a=b c=\"d e\" f="),
            pairs(&[("a", "b"), ("c", "\"d e\""), ("f", "")])
        );
        let Kind::Arg(args) = one("ARG a b=c=d") else { panic!() };
        assert_eq!(
            (args[0].default.as_deref(), args[1].default.as_deref()),
            (None, Some("c=d"))
        );
    }

    #[test]
    fn commands_have_two_forms() {
        assert_eq!(one("RUN echo $a"), Kind::Run(Command::Shell("echo $a".to_owned())));
        let exec = Command::Exec(vec!["a".to_owned(), "b c".to_owned()]);
        assert_eq!(one(r#"CMD ["a", "b c"]"#), Kind::Cmd(exec.clone()));
        assert_eq!(exec.to_shell(), "a 'b c'");
        assert_eq!(one("RUN [ -f x ]"), Kind::Run(Command::Shell("[ -f x ]".to_owned())));
        let heredoc = one("RUN <<EOF\na\nb\nEOF\n");
        assert_eq!(heredoc, Kind::Run(Command::Shell("a\nb\n".to_owned())));
        let heredoc = one("RUN <<EOF\n#!/bin/x\nb\nEOF\n");
        assert_eq!(heredoc, Kind::Run(Command::Script("#!/bin/x\nb\n".to_owned())));
        let heredoc = one("RUN cat <<-EOF >x\n\ta\n\tEOF\n");
        assert_eq!(
            heredoc,
            Kind::Run(Command::Shell("cat <<-EOF >x\n\ta\nEOF\n".to_owned()))
        );
    }

    #[test]
    fn a_heredoc_is_the_script_only_if_nothing_follows() {
        let shell = |text: &str| Command::Shell(text.to_owned());
        for (text, want) in [
            // What follows has the document as its input.
            ("RUN <<EOT bash\na\nEOT\n", shell("<<EOT bash\na\nEOT\n")),
            ("RUN <<EOT cat > /f\n#!/x\nEOT\n", shell("<<EOT cat > /f\n#!/x\nEOT\n")),
            ("RUN <<'EOT' bash\n$a\nEOT\n", shell("<<'EOT' bash\n$a\nEOT\n")),
            ("RUN <<-EOT bash\n\ta\n\tEOT\n", shell("<<-EOT bash\n\ta\nEOT\n")),
            ("RUN <<A <<B\na\nA\nb\nB\n", shell("<<A <<B\na\nA\nb\nB\n")),
            (
                "RUN cat <<A - 3<<B\na\nA\nb\nB\n",
                shell("cat <<A - 3<<B\na\nA\nb\nB\n"),
            ),
            (
                "RUN --mount=type=cache,target=/c <<E sh\na\nE\n",
                shell("<<E sh\na\nE\n"),
            ),
            // Nothing does.
            ("RUN <<'E F'\na $b\nE F\n", shell("a $b\n")),
            ("RUN <<$E\na\n$E\n", shell("a\n")),
            ("RUN <<-E\n\ta\n\t\tb\nE\n", shell("a\nb\n")),
            ("RUN 3<<E\na\nE\n", shell("a\n")),
            ("RUN <<-E\n#!/x\n\ta\nE\n", Command::Script("#!/x\na\n".to_owned())),
            ("RUN <<-E\n\t#!/x\n\ta\nE\n", shell("#!/x\na\n")),
            ("RUN <<E\n\n#!/x\nE\n", shell("\n#!/x\n")),
        ] {
            assert_eq!(one(text), Kind::Run(want), "{text}");
        }
    }

    #[test]
    fn copies_have_flags_and_sources() {
        let Kind::Copy(copy) = one("COPY --from=b --chown=1:2 --chmod=755 --link a \"b\" /c/") else {
            panic!()
        };
        assert_eq!(copy.from.as_deref(), Some("b"));
        assert_eq!(
            (copy.chown.as_deref(), copy.chmod.as_deref()),
            (Some("1:2"), Some("755"))
        );
        let paths = ["a", "\"b\""].map(|path| Source::Path(path.to_owned()));
        assert_eq!((copy.sources.as_slice(), copy.dest.as_str()), (&paths[..], "/c/"));
        let Kind::Copy(copy) = one(r#"ADD ["a b", "/c d"]"#) else {
            panic!()
        };
        assert_eq!(copy.sources, [Source::Path("a b".to_owned())]);
        let Kind::Copy(copy) = one("COPY <<A <<\"B\" c /d/\n$x\nA\n$y\nB\n") else {
            panic!()
        };
        let file = |name: &str, content: &str, is_expanded| Source::File {
            name: name.to_owned(),
            content: content.to_owned(),
            is_expanded,
        };
        let want = [
            file("A", "$x\n", true),
            file("B", "$y\n", false),
            Source::Path("c".to_owned()),
        ];
        assert_eq!(copy.sources, want);
    }

    #[test]
    fn what_has_no_effect_is_noted() {
        let document = Document::parse("FROM a\nLABEL a=b\nEXPOSE 80\nRUN --mount=type=cache,target=/c x\n").unwrap();
        let lines: Vec<usize> = document.notes.iter().map(|note| note.line).collect();
        assert_eq!((lines, document.instructions.len()), (vec![2, 3, 4], 2));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_with_its_line() {
        for (text, want) in [
            ("RUN --mount=type=secret,id=a x", "--mount"),
            ("RUN --mount=target=/x x", "--mount"),
            ("RUN --network=none x", "--network"),
            ("RUN --security=insecure x", "--security"),
            ("RUN", "RUN takes a command"),
            ("RUN []", "RUN takes a command"),
            ("ADD https://a/b /c", "ADD of an address"),
            ("ADD git@a:b /c", "ADD of an address"),
            ("ADD a.tar.gz /c", "RUN tar"),
            ("ADD --checksum=a b c", "--checksum"),
            ("ADD --from=a b c", "--from"),
            ("COPY --parents a b", "--parents"),
            ("COPY --chown= a b", "takes a value"),
            ("COPY a", "destination"),
            ("COPY", "destination"),
            ("COPY a b c", "write c/"),
            ("COPY [\"<<a\", \"b\"]", "no text"),
            ("COPY --from=a <<b c\nb", "heredocs"),
            ("COPY <<a/b c\na/b", "name of a file"),
            ("COPY <<\"a b\" c/\na b", "leave out blanks"),
            ("COPY a <<b\nb", "cannot be the destination"),
            ("ONBUILD RUN a", "ONBUILD"),
            ("SHELL bash", "JSON"),
            ("FROM a b", "FROM takes"),
            ("FROM a AS 1", "name of a stage"),
            ("FROM --x a", "FROM --x"),
            ("ENV", "ENV takes"),
            ("ENV a", "no value"),
            ("ENV a=b c", "name=value"),
            ("ARG", "ARG takes"),
            ("ARG a-b", "cannot be a name"),
            ("USER", "USER takes"),
            ("WORKDIR", "WORKDIR takes"),
            ("nonsense \u{1b}", "not an instruction"),
        ] {
            let error = Document::parse(&format!("\n# x\n{text}\n")).unwrap_err();
            assert_eq!(error.line, 3, "{text}");
            assert!(error.message.contains(want), "{text}: {error}");
        }
    }
}
