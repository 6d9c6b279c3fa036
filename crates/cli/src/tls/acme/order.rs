//! One certificate: order, DNS records, validation, issue.
//!
//! Every record for which the hook was run is removed again, whatever happened after. All waits are bounded: each
//! request, each run of the hook, and each wait for a decision of the server.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use instant_acme::{
    Account, AuthorizationStatus, ChallengeType, Error, Identifier, NewOrder, Order, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use secrecy::zeroize::Zeroizing;

use super::account::Accounts;
use super::hook::Action;
use super::http;
use super::settings::Acme;
use crate::tls::pair::Pair;

/// How long the server may take to validate the records, and then to issue.
const DECISION: Duration = Duration::from_secs(180);
/// Delay before the first question whether it has, which then grows.
const FIRST_QUESTION: Duration = Duration::from_millis(250);

/// Gets a certificate for a new key.
///
/// # Errors
/// When the server or the hook fails or refuses.
pub(super) async fn obtain(acme: &Acme, accounts: &Accounts) -> Result<Pair> {
    if let Some(problem) = acme.hook.problem() {
        bail!("{problem}");
    }
    let mut order = match begin(acme, accounts).await {
        Err(error) if has_type(&error, "accountDoesNotExist") => {
            accounts.forget()?;
            begin(acme, accounts).await?
        }
        begun => begun?,
    };
    let mut records = Vec::new();
    let authorized = authorize(acme, &mut order, &mut records).await;
    for (record, value) in &records {
        if let Err(error) = acme.hook.run(Action::Cleanup, record, value).await {
            tracing::warn!("a DNS record may be left: {error:#}");
        }
    }
    authorized?;

    let key = KeyPair::generate().context("generate a private key")?;
    let mut params = CertificateParams::new(acme.domains.clone()).context("create the certificate request")?;
    params.distinguished_name = DistinguishedName::new();
    let request = params
        .serialize_request(&key)
        .context("create the certificate request")?;
    order
        .finalize_csr(request.der())
        .await
        .context("request the certificate")?;
    let certificates = order
        .poll_certificate(&questions())
        .await
        .context("wait for the certificate")?;
    let key = Zeroizing::new(key.serialize_pem());
    Ok(Pair {
        certificates: certificates.into_bytes(),
        key: Zeroizing::new(key.as_bytes().to_vec()),
    })
}

async fn begin(acme: &Acme, accounts: &Accounts) -> Result<Order> {
    let client = http::Client::new(acme.ca.as_deref())?;
    let builder = Account::builder_with_http(Box::new(client));
    let account = accounts.open(acme, builder).await?;
    let names: Vec<Identifier> = acme.domains.iter().cloned().map(Identifier::Dns).collect();
    account
        .new_order(&NewOrder::new(&names))
        .await
        .context("order a certificate")
}

/// Shows the server that the names are ours. `records` are those for which the hook was run.
async fn authorize(acme: &Acme, order: &mut Order, records: &mut Vec<(String, String)>) -> Result<()> {
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization.context("read the challenge of a name")?;
        match authorization.status {
            // Shown for an earlier order.
            AuthorizationStatus::Valid => continue,
            AuthorizationStatus::Pending => {}
            status => bail!("the server reports status {status:?} for a name that is to be validated"),
        }
        let challenge = authorization
            .challenge(ChallengeType::Dns01)
            .context("the server does not offer to validate by DNS records (dns-01)")?;
        let name = challenge.identifier().to_string();
        let record = format!("_acme-challenge.{}.", name.strip_prefix("*.").unwrap_or(&name));
        let value = challenge.key_authorization().dns_value();
        // Before it runs: one that fails may have done half of its work.
        records.push((record.clone(), value.clone()));
        acme.hook.run(Action::Present, &record, &value).await?;
    }
    if !records.is_empty() {
        tokio::time::sleep(acme.dns_wait).await;
    }
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization.context("read the challenge of a name")?;
        if authorization.status == AuthorizationStatus::Pending
            && let Some(mut challenge) = authorization.challenge(ChallengeType::Dns01)
        {
            challenge.set_ready().await.context("request the validation")?;
        }
    }
    let decided = order.poll_ready(&questions()).await;
    match decided {
        Ok(OrderStatus::Ready) => Ok(()),
        Ok(_) => bail!("the server refused the DNS records{}", reasons(order).await),
        Err(error @ Error::Api(_)) => Err(error).context("the server refused the DNS records"),
        Err(error) => Err(error).context("wait for the validation"),
    }
}

/// Why the server refused names, in its words.
async fn reasons(order: &mut Order) -> String {
    let mut reasons = String::new();
    let mut authorizations = order.authorizations();
    while let Some(Ok(mut authorization)) = authorizations.next().await {
        let Ok(state) = authorization.refresh().await else {
            continue;
        };
        for problem in state.challenges.iter().filter_map(|challenge| challenge.error.as_ref()) {
            let detail = problem.detail.as_deref().unwrap_or("without a reason");
            // Of a server that we chose, but into our log.
            let detail: String = detail.chars().filter(|c| !c.is_control()).take(500).collect();
            reasons.push_str(": ");
            reasons.push_str(&detail);
        }
    }
    reasons
}

fn questions() -> RetryPolicy {
    RetryPolicy::new()
        .initial_delay(FIRST_QUESTION)
        .backoff(1.5)
        .timeout(DECISION)
}

/// Whether the server said that there were too many requests.
pub(super) fn is_rate_limit(error: &anyhow::Error) -> bool {
    has_type(error, "rateLimited")
}

fn has_type(error: &anyhow::Error, name: &str) -> bool {
    error.chain().any(|cause| match cause.downcast_ref::<Error>() {
        Some(Error::Api(problem)) => {
            let of = problem.r#type.as_deref().and_then(|of| of.rsplit(':').next());
            of == Some(name)
        }
        _ => false,
    })
}
