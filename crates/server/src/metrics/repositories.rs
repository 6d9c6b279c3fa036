//! Metrics of repositories that sandboxes get.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use super::series::{Counts, series};
use crate::repositories::RepositoryError;

#[derive(Debug)]
pub(super) struct RepositorySeries {
    prepared: Counter,
    from_copy: Counter,
    failures: Counts,
}

impl RepositorySeries {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            prepared: series(
                registry,
                "repositories_prepared",
                "Repositories that sandboxes got as working trees",
            ),
            from_copy: series(
                registry,
                "repositories_from_copy",
                "Repositories of which the platform had a copy",
            ),
            failures: Counts::register(
                registry,
                "repositories_failures",
                "Create requests that failed because of their repositories, by reason",
                "reason",
                RepositoryError::REASONS,
            ),
        }
    }

    pub(super) fn count(&self, count: usize, prepared: &Result<usize, RepositoryError>) {
        match prepared {
            Ok(from_copy) => {
                self.prepared.inc_by(count as u64);
                self.from_copy.inc_by(*from_copy as u64);
            }
            Err(error) => self.failures.add(error.reason(), 1),
        }
    }
}
