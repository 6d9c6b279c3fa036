//! Schemas of the OpenAPI document as tables of Markdown.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};

/// Where references to schemas point to.
const PREFIX: &str = "#/components/schemas/";

/// The named schemas of a document.
pub(super) struct Schemas<'a> {
    named: &'a Value,
}

impl<'a> Schemas<'a> {
    pub(super) fn of(document: &'a Value) -> Self {
        Self {
            named: &document["components"]["schemas"],
        }
    }

    fn target<'v>(&self, schema: &'v Value) -> Option<(&'v str, &'a Value)> {
        let name = schema["$ref"].as_str()?.strip_prefix(PREFIX)?;
        Some((name, self.named.get(name)?))
    }

    /// The type of a value, with links to objects, which are added to `used`.
    pub(super) fn kind(&self, schema: &Value, used: &mut BTreeSet<String>) -> String {
        if let Some((name, target)) = self.target(schema) {
            if !is_object(target) {
                return self.kind(target, used);
            }
            if name == "Error" {
                // Described for all operations together.
                return "[error](index.md#errors)".to_owned();
            }
            used.insert(name.to_owned());
            return format!("[{name}](#{})", name.to_lowercase());
        }
        for choice in ["oneOf", "anyOf", "allOf"] {
            if let Some(options) = schema[choice].as_array() {
                let kinds: BTreeSet<String> = options.iter().map(|option| self.kind(option, used)).collect();
                return kinds.into_iter().collect::<Vec<_>>().join(" or ");
            }
        }
        if let Some(values) = schema["enum"].as_array() {
            let values: Vec<String> = values.iter().map(|value| format!("`{}`", plain(value))).collect();
            return values.join(", ");
        }
        let names: Vec<&str> = match &schema["type"] {
            Value::String(name) => vec![name],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let shown: Vec<String> = names
            .into_iter()
            .map(|name| match name {
                "array" => format!("array of {}", self.kind(&schema["items"], used)),
                "string" if schema["format"] == "date-time" => "time".to_owned(),
                "object" if schema["additionalProperties"].is_object() => {
                    format!("object of {}", self.kind(&schema["additionalProperties"], used))
                }
                name => name.to_owned(),
            })
            .collect();
        if shown.is_empty() {
            "any".to_owned()
        } else {
            shown.join(" or ")
        }
    }

    /// Description, default and limits of a value.
    pub(super) fn notes(&self, schema: &Value, description: Option<&str>) -> String {
        let described = self.target(schema).filter(|(_, target)| !is_object(target));
        let inner = described.map_or(schema, |(_, target)| target);
        let mut notes: Vec<String> = Vec::new();
        if let Some(text) = description.or_else(|| inner["description"].as_str()) {
            notes.push(one_line(text).trim_end_matches('.').to_owned());
        }
        if inner["deprecated"] == true {
            notes.push("Deprecated".to_owned());
        }
        if let Some(default) = inner.get("default") {
            notes.push(format!("Default: `{}`", plain(default)));
        }
        let limits = [
            ("minimum", "maximum", ""),
            ("minLength", "maxLength", " characters"),
            ("minItems", "maxItems", " entries"),
        ];
        for (low, high, after) in limits {
            match (inner.get(low), inner.get(high)) {
                (Some(low), Some(high)) => notes.push(format!("{low} to {high}{after}")),
                (None, Some(high)) => notes.push(format!("At most {high}{after}")),
                (Some(low), None) if low == 1 && !after.is_empty() => notes.push("Not empty".to_owned()),
                (Some(low), None) if low != 0 => notes.push(format!("At least {low}{after}")),
                _ => {}
            }
        }
        if let Some(example) = inner.get("example") {
            notes.push(format!("Example: `{}`", plain(example)));
        }
        if notes.is_empty() {
            String::new()
        } else {
            format!("{}.", notes.join(". "))
        }
    }

    /// Names of these objects, and of all objects that they refer to.
    pub(super) fn reachable(&self, names: &BTreeSet<String>) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut left: Vec<String> = names.iter().cloned().collect();
        while let Some(name) = left.pop() {
            if name == "Error" || !found.insert(name.clone()) {
                continue;
            }
            let mut used = BTreeSet::new();
            let (fields, _) = self.fields(&self.named[&name]);
            for field in fields.values() {
                self.kind(field, &mut used);
            }
            left.extend(used);
        }
        found
    }

    /// Description and fields of a named object.
    pub(super) fn table(&self, name: &str) -> Result<String> {
        let schema = self
            .named
            .get(name)
            .with_context(|| format!("there is no schema {name}"))?;
        let (fields, required) = self.fields(schema);
        let mut text = String::new();
        if let Some(description) = schema["description"].as_str() {
            let _ = write!(text, "{}\n\n", one_line(description));
        }
        text.push_str("| Field | Type | Description |\n|---|---|---|\n");
        for (field, value) in &fields {
            let need = if required.contains(field) { ", required" } else { "" };
            let kind = self.kind(value, &mut BTreeSet::new());
            let notes = self.notes(value, value["description"].as_str());
            let _ = writeln!(text, "| `{field}` | {kind}{need} | {notes} |");
        }
        Ok(text)
    }

    /// The fields of an object with those of the objects that it includes, and the names of the required ones.
    fn fields(&self, schema: &Value) -> (Map<String, Value>, BTreeSet<String>) {
        let mut fields = Map::new();
        let mut required = BTreeSet::new();
        let mut parts = vec![schema];
        while let Some(part) = parts.pop() {
            if let Some((_, target)) = self.target(part) {
                parts.push(target);
            }
            parts.extend(part["allOf"].as_array().into_iter().flatten());
            let properties = part["properties"].as_object().into_iter().flatten();
            fields.extend(properties.map(|(name, value)| (name.clone(), value.clone())));
            let names = part["required"].as_array().into_iter().flatten();
            required.extend(names.filter_map(Value::as_str).map(str::to_owned));
        }
        (fields, required)
    }
}

/// Whether a schema has fields of its own, and so a table.
fn is_object(schema: &Value) -> bool {
    schema.get("properties").is_some() || schema.get("allOf").is_some()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A text for a cell of a table.
pub(super) fn one_line(text: &str) -> String {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    joined.replace('|', "\\|")
}
