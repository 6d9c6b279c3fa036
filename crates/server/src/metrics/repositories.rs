//! Metrics of repositories that sandboxes get.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::repositories::RepositoryError;

#[derive(Debug)]
pub(super) struct RepositorySeries {
    prepared: Counter,
    from_copy: Counter,
    failures: Family<[(&'static str, &'static str); 1], Counter>,
}

impl RepositorySeries {
    /// Exported from the first scrape on.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let (prepared, from_copy) = (Counter::default(), Counter::default());
        registry.register(
            "repositories_prepared",
            "Repositories that sandboxes got as working trees",
            prepared.clone(),
        );
        registry.register(
            "repositories_from_copy",
            "Repositories of which the platform had a copy",
            from_copy.clone(),
        );
        let failures = Family::<_, Counter>::default();
        registry.register(
            "repositories_failures",
            "Create requests that failed because of their repositories, by reason",
            failures.clone(),
        );
        for reason in RepositoryError::REASONS {
            failures.get_or_create_owned(&[("reason", reason)]);
        }
        Self {
            prepared,
            from_copy,
            failures,
        }
    }

    pub(super) fn count(&self, count: usize, prepared: &Result<usize, RepositoryError>) {
        match prepared {
            Ok(from_copy) => {
                self.prepared.inc_by(count as u64);
                self.from_copy.inc_by(*from_copy as u64);
            }
            Err(error) => {
                self.failures.get_or_create(&[("reason", error.reason())]).inc();
            }
        }
    }
}
