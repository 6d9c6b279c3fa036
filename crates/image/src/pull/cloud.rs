//! Exchange of cloud credentials for those of the cloud's registry.
//!
//! The endpoints are those that the documentation of the clouds names; they were tried against stand-ins only.

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use formats::percent;
use hmac::{Hmac, KeyInit, Mac};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method};
use jiff::Timestamp;
use protocol::image::{Credentials, Transfer};
use registry::{Client, Login, Url, secret};
use rustls::SignatureScheme;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Maximum size of a response with a token.
const TOKEN_MAX: usize = 1 << 20;
const ECR_TARGET: &str = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken";
const ECR_BODY: &[u8] = b"{}";
const ECR_TYPE: &str = "application/x-amz-json-1.1";
const GCP_SCOPE: &str =
    "https://www.googleapis.com/auth/devstorage.read_only https://www.googleapis.com/auth/cloud-platform.read-only";
const GCP_GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
/// How long a token of GCP is valid, in seconds.
const GCP_LIFETIME: i64 = 3600;

/// User name and password for a registry.
pub(super) async fn login(
    client: &Client,
    credentials: &Credentials,
    registry: &str,
    transfer: &Transfer,
    now: Timestamp,
) -> Result<Login> {
    match credentials {
        Credentials::Registry { username, password } => Ok(Login {
            username: username.clone(),
            password: password.expose().to_owned(),
        }),
        Credentials::Aws {
            access_key_id,
            secret_access_key,
            region,
        } => {
            let is_ours = registry.ends_with(".amazonaws.com") || registry.ends_with(".amazonaws.com.cn");
            ensure!(
                is_ours || transfer.aws_endpoint.is_some(),
                "credentials of AWS are for registries of ECR, and {registry} is not one"
            );
            let is_region =
                !region.is_empty() && region.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            ensure!(is_region, "invalid region {region:?}");
            let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
            let endpoint = transfer.aws_endpoint.clone();
            let endpoint = endpoint.unwrap_or_else(|| format!("https://api.ecr.{region}.amazonaws.com{suffix}/"));
            let key = AwsKey {
                id: access_key_id,
                secret: secret_access_key.expose(),
                region,
            };
            ecr(client, &Url::parse(&endpoint)?, &key, now)
                .await
                .context("get a password of ECR")
        }
        Credentials::Gcp { service_account_json } => {
            let is_ours = registry == "gcr.io" || registry.ends_with(".gcr.io") || registry.ends_with(".pkg.dev");
            ensure!(
                is_ours || transfer.gcp_endpoint.is_some(),
                "credentials of GCP are for registries of Google, and {registry} is not one"
            );
            // A message of the parser could quote the key.
            let account: ServiceAccount = serde_json::from_str(service_account_json.expose())
                .map_err(|_| anyhow!("serviceAccountJson is not the key of a service account"))?;
            let endpoint = transfer.gcp_endpoint.as_ref().unwrap_or(&account.token_uri);
            gcp(client, &Url::parse(endpoint)?, &account, now)
                .await
                .context("get a token of GCP")
        }
    }
}

struct AwsKey<'a> {
    id: &'a str,
    secret: &'a str,
    region: &'a str,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EcrResponse {
    authorization_data: Vec<EcrData>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EcrData {
    authorization_token: String,
}

async fn ecr(client: &Client, url: &Url, key: &AwsKey<'_>, now: Timestamp) -> Result<Login> {
    let time = now.strftime("%Y%m%dT%H%M%SZ").to_string();
    let authority = url.authority();
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(ECR_TYPE));
    headers.insert("x-amz-target", HeaderValue::from_static(ECR_TARGET));
    headers.insert("x-amz-date", time.parse()?);
    headers.insert(AUTHORIZATION, secret(&aws_signature(key, &authority, &time))?);
    let body = Bytes::from_static(ECR_BODY);
    let response = client
        .send(&Method::POST, url, &headers, &body)
        .await
        .map_err(|failure| failure.error)?;
    ensure!(
        response.status.is_success(),
        "{authority} responded with status {}",
        response.status
    );
    let bytes = response.bytes(TOKEN_MAX).await.map_err(|failure| failure.error)?;
    let response: EcrResponse = serde_json::from_slice(&bytes).map_err(|_| anyhow!("invalid response"))?;
    let token = response
        .authorization_data
        .first()
        .context("no token in the response")?;
    let token = STANDARD
        .decode(&token.authorization_token)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let token = token.context("invalid token in the response")?;
    let (username, password) = token.split_once(':').context("invalid token in the response")?;
    Ok(Login {
        username: username.to_owned(),
        password: password.to_owned(),
    })
}

/// `Authorization` of a request, by signature version 4 of AWS.
fn aws_signature(key: &AwsKey<'_>, host: &str, time: &str) -> String {
    let names = "content-type;host;x-amz-date;x-amz-target";
    let request = format!(
        "POST\n/\n\ncontent-type:{ECR_TYPE}\nhost:{host}\nx-amz-date:{time}\nx-amz-target:{ECR_TARGET}\n\n{names}\n{}",
        hex::encode(Sha256::digest(ECR_BODY))
    );
    let date = &time[..8];
    let scope = format!("{date}/{}/ecr/aws4_request", key.region);
    let text = format!(
        "AWS4-HMAC-SHA256\n{time}\n{scope}\n{}",
        hex::encode(Sha256::digest(request))
    );
    let mut derived = format!("AWS4{}", key.secret).into_bytes();
    for part in [date, key.region, "ecr", "aws4_request"] {
        derived = mac(&derived, part);
    }
    let signature = hex::encode(mac(&derived, &text));
    format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
        key.id
    )
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

#[derive(Deserialize)]
struct ServiceAccount {
    client_email: String,
    private_key: String,
    #[serde(default = "google")]
    token_uri: String,
}

fn google() -> String {
    "https://oauth2.googleapis.com/token".to_owned()
}

#[derive(Deserialize)]
struct GcpResponse {
    access_token: String,
}

async fn gcp(client: &Client, url: &Url, account: &ServiceAccount, now: Timestamp) -> Result<Login> {
    let assertion = assertion(account, now.as_second())?;
    let body = format!("grant_type={}&assertion={assertion}", percent::encode(GCP_GRANT));
    let mut headers = HeaderMap::new();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/x-www-form-urlencoded"),
    );
    let response = client
        .send(&Method::POST, url, &headers, &Bytes::from(body))
        .await
        .map_err(|failure| failure.error)?;
    let (status, authority) = (response.status, response.authority.clone());
    ensure!(status.is_success(), "{authority} responded with status {status}");
    let bytes = response.bytes(TOKEN_MAX).await.map_err(|failure| failure.error)?;
    let response: GcpResponse = serde_json::from_slice(&bytes).map_err(|_| anyhow!("invalid response"))?;
    Ok(Login {
        username: "oauth2accesstoken".to_owned(),
        password: response.access_token,
    })
}

/// A token that the service account signs.
fn assertion(account: &ServiceAccount, now: i64) -> Result<String> {
    let claims = serde_json::json!({
        "iss": account.client_email, "scope": GCP_SCOPE, "aud": account.token_uri,
        "iat": now, "exp": now + GCP_LIFETIME,
    });
    let encoded = |text: &str| URL_SAFE_NO_PAD.encode(text);
    let text = format!(
        "{}.{}",
        encoded(r#"{"alg":"RS256","typ":"JWT"}"#),
        encoded(&claims.to_string())
    );
    let invalid = || anyhow!("serviceAccountJson has an invalid private key");
    let key = PrivateKeyDer::from_pem_slice(account.private_key.as_bytes()).map_err(|_| invalid())?;
    let key = aws_lc_rs::sign::any_supported_type(&key).map_err(|_| invalid())?;
    let signer = key
        .choose_scheme(&[SignatureScheme::RSA_PKCS1_SHA256])
        .ok_or_else(invalid)?;
    let signature = signer.sign(text.as_bytes()).map_err(|_| invalid())?;
    Ok(format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature)))
}
