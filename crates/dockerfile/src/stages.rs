//! Stages: what each begins with, and which of them a target needs.

use std::collections::BTreeMap;

use crate::expand::{Escape, expand};
use crate::instruction::{Argument, Document, Instruction, Kind};
use crate::limits::STAGES_MAX;
use crate::note::Note;
use crate::refusal::Refusal;

/// The stages of a Dockerfile that a target needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The character that escapes others.
    pub escape: Escape,
    /// All stages, in order.
    pub stages: Vec<Stage>,
    /// The stage that becomes the template.
    pub target: usize,
    /// What has no effect.
    pub notes: Vec<Note>,
    /// Arguments of the build: what stages may take over.
    globals: BTreeMap<String, String>,
    given: BTreeMap<String, String>,
}

/// One stage of a Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Line at which the stage begins, from 1.
    pub line: usize,
    /// Its name, in lower case.
    pub name: Option<String>,
    /// The file system that the stage begins with.
    pub base: Base,
    /// Its instructions, without `FROM`.
    pub instructions: Vec<Instruction>,
}

/// What a stage begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// No files: `FROM scratch`.
    Scratch,
    /// An earlier stage.
    Stage(usize),
    /// An image.
    Image(String),
    /// An archive that was uploaded for the build, by its hash: `FROM archive:HASH`.
    Archive(String),
}

/// What `COPY --from` copies from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// An earlier stage.
    Stage(usize),
    /// An image.
    Image(String),
}

/// Arguments that need no `ARG`.
const PREDEFINED: [&str; 10] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "FTP_PROXY",
    "ftp_proxy",
    "NO_PROXY",
    "no_proxy",
    "ALL_PROXY",
    "all_proxy",
];

/// Start of the name of an archive that was uploaded for the build; 64 hexadecimal digits follow.
const ARCHIVE: &str = "archive:";
/// Length of the hash of an archive, in characters.
const HASH_LENGTH: usize = 64;

/// The hash in the name of an archive; none if the name is that of something else.
fn archive(name: &str) -> Option<&str> {
    let hash = name.strip_prefix(ARCHIVE)?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (hash.len() == HASH_LENGTH && hash.bytes().all(is_digit)).then_some(hash)
}

impl Plan {
    /// Parses a file for a target, the last stage by default, with arguments for the build, on a platform such as
    /// `linux/amd64`.
    ///
    /// # Errors
    /// When it is malformed, or has what cannot be honoured.
    pub fn parse(
        text: &str,
        target: Option<&str>,
        given: &BTreeMap<String, String>,
        platform: &str,
    ) -> Result<Self, Refusal> {
        let Document {
            escape,
            instructions,
            notes,
        } = Document::parse(text)?;
        let mut globals = BTreeMap::new();
        for prefix in ["TARGET", "BUILD"] {
            let (os, arch) = platform.split_once('/').unwrap_or((platform, ""));
            globals.insert(format!("{prefix}PLATFORM"), platform.to_owned());
            globals.insert(format!("{prefix}OS"), os.to_owned());
            globals.insert(format!("{prefix}ARCH"), arch.to_owned());
        }
        let mut plan = Self {
            escape,
            stages: Vec::new(),
            target: 0,
            notes,
            globals,
            given: given.clone(),
        };
        for instruction in instructions {
            plan.add(instruction, platform)?;
        }
        let Some(last) = plan.stages.len().checked_sub(1) else {
            return Err(Refusal::new(1, "the Dockerfile has no FROM"));
        };
        plan.target = match target {
            None => last,
            Some(name) => plan.find(name, last + 1).ok_or_else(|| {
                let line = plan.stages[last].line;
                Refusal::new(line, format!("the Dockerfile has no stage {name:?}"))
            })?,
        };
        // Every origin must be known before anything runs.
        for (index, stage) in plan.stages.iter().enumerate() {
            for instruction in &stage.instructions {
                plan.origin(index, instruction)?;
            }
        }
        Ok(plan)
    }

    fn add(&mut self, instruction: Instruction, platform: &str) -> Result<(), Refusal> {
        let Instruction { line, text, kind } = instruction;
        let (image, name, wanted) = match kind {
            Kind::From { image, name, platform } => (image, name, platform),
            Kind::Arg(arguments) if self.stages.is_empty() => {
                for argument in &arguments {
                    let default = match &argument.default {
                        Some(default) => Some(self.global(line, default)?),
                        None => None,
                    };
                    let value = self.given.get(&argument.name).cloned().or(default);
                    if let Some(value) = value {
                        self.globals.insert(argument.name.clone(), value);
                    }
                }
                return Ok(());
            }
            kind => {
                let Some(stage) = self.stages.last_mut() else {
                    return Err(Refusal::new(line, "the first instruction must be FROM, or ARG"));
                };
                stage.instructions.push(Instruction { line, text, kind });
                return Ok(());
            }
        };
        if self.stages.len() == STAGES_MAX {
            return Err(Refusal::new(line, format!("more than {STAGES_MAX} stages")));
        }
        if let Some(wanted) = wanted {
            let wanted = self.global(line, &wanted)?;
            if wanted != platform {
                let why = format!("platform {wanted:?} cannot be built here: this host is {platform}");
                return Err(Refusal::new(line, why));
            }
        }
        let image = self.global(line, &image)?;
        if image.is_empty() || image.contains(char::is_whitespace) {
            let why = "the image of FROM is empty after its variables were replaced: give them a default with ARG";
            return Err(Refusal::new(line, why));
        }
        if let Some(name) = &name
            && self.stages.iter().any(|stage| stage.name.as_ref() == Some(name))
        {
            return Err(Refusal::new(line, format!("two stages have the name {name}")));
        }
        let base = match self.named(&image, self.stages.len()) {
            Some(stage) => Base::Stage(stage),
            None if image == "scratch" => Base::Scratch,
            None => match archive(&image) {
                Some(hash) => Base::Archive(hash.to_owned()),
                None => Base::Image(image),
            },
        };
        self.stages.push(Stage {
            line,
            name,
            base,
            instructions: Vec::new(),
        });
        Ok(())
    }

    fn global(&self, line: usize, word: &str) -> Result<String, Refusal> {
        expand(word, self.escape, &|name| self.globals.get(name).map(String::as_str))
            .map_err(|error| Refusal::new(line, error.to_string()))
    }

    fn named(&self, name: &str, before: usize) -> Option<usize> {
        let name = name.to_ascii_lowercase();
        let mut stages = self.stages[..before].iter();
        stages.position(|stage| stage.name.as_ref() == Some(&name))
    }

    /// The stage with a name or number, among those before another one.
    fn find(&self, name: &str, before: usize) -> Option<usize> {
        let number = || name.parse().ok().filter(|number| *number < before);
        self.named(name, before).or_else(number)
    }

    /// What an instruction of a stage copies from; none if it is not another stage or image.
    ///
    /// # Errors
    /// When there is no such stage.
    pub fn origin(&self, stage: usize, instruction: &Instruction) -> Result<Option<Origin>, Refusal> {
        let Kind::Copy(copy) = &instruction.kind else {
            return Ok(None);
        };
        let Some(from) = &copy.from else { return Ok(None) };
        let refused = |message: String| Err(Refusal::new(instruction.line, message));
        if from.contains('$') {
            return refused("COPY --from takes no variables: begin a stage with FROM and name that".to_owned());
        }
        if let Some(found) = self.find(from, stage) {
            return Ok(Some(Origin::Stage(found)));
        }
        if archive(from).is_some() {
            return refused("COPY --from takes no archive: begin a stage with FROM and name that".to_owned());
        }
        if from.parse::<usize>().is_ok() || self.named(from, self.stages.len()).is_some() {
            return refused(format!("COPY --from={from}: there is no such stage before this one"));
        }
        Ok(Some(Origin::Image(from.clone())))
    }

    /// Whether each stage is needed for the target.
    #[must_use]
    pub fn needed(&self) -> Vec<bool> {
        let mut needed = vec![false; self.stages.len()];
        needed[self.target] = true;
        // Stages refer to earlier ones only.
        for index in (0..=self.target).rev() {
            if !needed[index] {
                continue;
            }
            let stage = &self.stages[index];
            if let Base::Stage(other) = stage.base {
                needed[other] = true;
            }
            for instruction in &stage.instructions {
                if let Ok(Some(Origin::Stage(other))) = self.origin(index, instruction) {
                    needed[other] = true;
                }
            }
        }
        needed
    }

    /// The value of an argument that a stage declares: the one given, its default as `expanded`, or that of the
    /// beginning of the file.
    #[must_use]
    pub fn argument(&self, argument: &Argument, expanded: Option<String>) -> Option<String> {
        let given = self.given.get(&argument.name).cloned();
        given.or(expanded).or_else(|| self.globals.get(&argument.name).cloned())
    }

    /// Arguments that every stage has without a declaration.
    #[must_use]
    pub fn predefined(&self) -> BTreeMap<String, String> {
        let given = self.given.iter();
        given
            .filter(|(name, _)| PREDEFINED.contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLATFORM: &str = "linux/amd64";

    fn plan(text: &str, target: Option<&str>, args: &[(&str, &str)]) -> Result<Plan, Refusal> {
        let args = args.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
        Plan::parse(text, target, &args.collect(), PLATFORM)
    }

    #[test]
    fn stages_refer_to_earlier_ones() {
        let text = "ARG V=1\nARG IMAGE=debian:$V\nFROM $IMAGE AS Build\nRUN a\nFROM scratch as other\nFROM build\n\
                    COPY --from=BUILD a b\nCOPY --from=1 a b\nCOPY --from=nginx:1 a b\n";
        let plan = plan(text, None, &[("V", "2")]).unwrap();
        let bases: Vec<Base> = plan.stages.iter().map(|stage| stage.base.clone()).collect();
        assert_eq!(
            bases,
            [Base::Image("debian:2".to_owned()), Base::Scratch, Base::Stage(0)]
        );
        let origins: Vec<_> = plan.stages[2]
            .instructions
            .iter()
            .map(|instruction| plan.origin(2, instruction).unwrap().unwrap())
            .collect();
        let want = [Origin::Stage(0), Origin::Stage(1), Origin::Image("nginx:1".to_owned())];
        assert_eq!(origins, want);
        assert_eq!(plan.needed(), [true, true, true]);
    }

    #[test]
    fn a_stage_may_begin_with_an_archive() {
        let hash = "0123456789abcdef".repeat(4);
        let text = "ARG BASE=e2bdev/base\nFROM $BASE\n";
        let base = |name: &str| plan(text, None, &[("BASE", name)]).unwrap().stages[0].base.clone();
        assert_eq!(base(&format!("archive:{hash}")), Base::Archive(hash.clone()));
        // What is no hash is the tag of an image.
        for name in ["archive:1", "archive", &format!("archive:{}", hash.to_uppercase())] {
            assert_eq!(base(name), Base::Image(name.to_owned()));
        }
        let error = plan(&format!("FROM a\nCOPY --from=archive:{hash} a b\n"), None, &[]).unwrap_err();
        assert_eq!((error.line, error.message.contains("no archive")), (2, true), "{error}");
    }

    #[test]
    fn only_what_the_target_needs_is_built() {
        let text = "FROM a AS one\nFROM b AS two\nFROM c\nCOPY --from=one x y\n";
        assert_eq!(plan(text, None, &[]).unwrap().needed(), [true, false, true]);
        assert_eq!(plan(text, Some("TWO"), &[]).unwrap().needed(), [false, true, false]);
        assert_eq!(plan(text, Some("0"), &[]).unwrap().target, 0);
    }

    #[test]
    fn arguments_of_stages() {
        let text = "ARG A=1\nARG B=2\nFROM a\nARG A\nARG B=3\nARG C\n";
        let plan = plan(text, None, &[("C", "4"), ("no_proxy", "x"), ("D", "5")]).unwrap();
        let value = |name: &str, default: Option<&str>| {
            let argument = Argument {
                name: name.to_owned(),
                default: None,
            };
            plan.argument(&argument, default.map(str::to_owned))
        };
        assert_eq!(value("A", None).as_deref(), Some("1"));
        assert_eq!(value("B", Some("3")).as_deref(), Some("3"));
        assert_eq!(value("C", Some("5")).as_deref(), Some("4"));
        assert_eq!(value("E", None), None);
        assert_eq!(value("TARGETARCH", None).as_deref(), Some("amd64"));
        assert_eq!(plan.predefined().len(), 1);
    }

    #[test]
    fn refusals_have_their_line() {
        for (text, line, want) in [
            ("", 1, "no FROM"),
            ("ARG A\n", 1, "no FROM"),
            ("\nRUN a\nFROM a", 2, "first instruction"),
            ("FROM a\nFROM $B\n", 2, "empty"),
            ("FROM a AS x\nFROM b AS X\n", 2, "two stages"),
            ("FROM --platform=linux/arm64 a\n", 1, "linux/arm64"),
            ("FROM a\nCOPY --from=0 a b\n", 2, "no such stage"),
            ("FROM a\nCOPY --from=x a b\nFROM b AS x\n", 2, "no such stage"),
            ("FROM a\nCOPY --from=$x a b\n", 2, "no variables"),
        ] {
            let error = plan(text, None, &[]).unwrap_err();
            assert_eq!(error.line, line, "{text}");
            assert!(error.message.contains(want), "{text}: {error}");
        }
        assert!(plan("FROM a\n", Some("x"), &[]).is_err());
        assert!(plan("FROM --platform=$BUILDPLATFORM a\n", None, &[]).is_ok());
        assert!(plan(&"FROM a\n".repeat(STAGES_MAX + 1), None, &[]).is_err());
    }
}
