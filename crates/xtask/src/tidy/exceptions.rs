//! What may break a rule for the time being, and why.
//!
//! An exception that covers nothing is a breach, so a change that mends a place takes its line out, and nothing is added
//! without being seen in review.

use super::breach::Breach;

/// A rule, who may break it, and why and until when. A subject that ends with `/` is everything below that directory.
type Exception = (&'static str, &'static str, &'static str);

const TODAY: &[Exception] = &[];

/// The exceptions, and which of them have covered a breach.
#[derive(Debug)]
pub(super) struct Exceptions {
    list: &'static [Exception],
    needed: Vec<bool>,
}

impl Exceptions {
    pub(super) fn of_today() -> Self {
        Self::of(TODAY)
    }

    pub(super) fn of(list: &'static [Exception]) -> Self {
        Self {
            list,
            needed: vec![false; list.len()],
        }
    }

    /// Whether a breach may stay.
    pub(super) fn covers(&mut self, breach: &Breach) -> bool {
        let found = self.list.iter().position(|(rule, subject, _)| {
            let below = subject.ends_with('/') && breach.subject.starts_with(subject);
            *rule == breach.rule && (below || *subject == breach.subject)
        });
        if let Some(index) = found {
            self.needed[index] = true;
        }
        found.is_some()
    }

    /// A breach for each exception that covered nothing.
    pub(super) fn unused(&self) -> Vec<Breach> {
        let unused = self.list.iter().zip(&self.needed).filter(|(_, needed)| !**needed);
        unused
            .map(|((rule, subject, _), _)| Breach {
                rule: "exception",
                subject: (*subject).to_owned(),
                message: format!("keeps to the rule `{rule}` now: take its line out of tidy/exceptions.rs"),
            })
            .collect()
    }
}
