//! Access to the OpenAPI document for the tests.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// The OpenAPI document.
pub(super) struct Document(pub(super) Value);

/// One operation of the document.
pub(super) struct Operation {
    pub(super) id: String,
    pub(super) method: String,
    pub(super) path: String,
    pub(super) parameters: Vec<Value>,
    /// The schema of the body, if the operation takes one.
    pub(super) body: Option<Value>,
    pub(super) needs_body: bool,
    /// Its responses, by status.
    pub(super) responses: BTreeMap<String, Value>,
    /// Whether its summary says that it is not built yet.
    is_not_built: bool,
    /// Whether the operation needs no credentials.
    pub(super) is_open: bool,
}

impl Operation {
    /// Whether it is not built yet according to the document.
    pub(super) fn is_not_built(&self) -> bool {
        self.is_not_built
    }
}

/// A valid or invalid value for the schema of a parameter or a key.
pub(super) struct Case {
    pub(super) value: Value,
    pub(super) allowed: bool,
}

impl Document {
    pub(super) fn operations(&self) -> Vec<Operation> {
        let mut operations = Vec::new();
        for (path, item) in self.0["paths"].as_object().expect("paths") {
            for (method, operation) in item.as_object().expect("an item") {
                let body = &operation["requestBody"];
                let responses = operation["responses"].as_object().expect("responses");
                operations.push(Operation {
                    id: operation["operationId"].as_str().expect("an id").to_owned(),
                    method: method.to_uppercase(),
                    path: path.clone(),
                    parameters: operation["parameters"].as_array().cloned().unwrap_or_default(),
                    body: body.pointer("/content/application~1json/schema").cloned(),
                    needs_body: body["required"] == true,
                    responses: responses.clone().into_iter().collect(),
                    is_not_built: operation["summary"]
                        .as_str()
                        .is_some_and(|text| text.starts_with("Not built yet: ")),
                    is_open: operation["security"].as_array().is_some_and(Vec::is_empty),
                });
            }
        }
        operations
    }

    pub(super) fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(place) => self
                .0
                .pointer(&place[1..])
                .unwrap_or_else(|| panic!("nothing at {place}")),
            None => schema,
        }
    }

    /// Asserts that a value matches a schema.
    pub(super) fn conforms(&self, schema: &Value, value: &Value, at: &str) {
        let schema = self.resolve(schema);
        for part in schema["allOf"].as_array().into_iter().flatten() {
            self.conforms(part, value, at);
        }
        let types = types(schema);
        let is = |kind: &str| match kind {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => panic!("{at}: unknown type {kind}"),
        };
        assert!(
            types.is_empty() || types.iter().any(|kind| is(kind)),
            "{at}: {value} is no {types:?}"
        );
        if let Some(allowed) = schema["enum"].as_array() {
            assert!(allowed.contains(value), "{at}: {value} is none of {allowed:?}");
        }
        if let Some(keys) = value.as_object() {
            for required in schema["required"].as_array().into_iter().flatten() {
                let key = required.as_str().expect("a key");
                assert!(keys.contains_key(key), "{at}: {key} is missing in {value}");
            }
            for (key, value) in keys {
                let known = schema["properties"]
                    .get(key)
                    .or_else(|| schema.get("additionalProperties"));
                if let Some(schema) = known.filter(|schema| schema.is_object()) {
                    self.conforms(schema, value, &format!("{at}/{key}"));
                }
            }
        }
        for item in value.as_array().into_iter().flatten() {
            self.conforms(&schema["items"], item, &format!("{at}/items"));
        }
    }

    /// An example of a schema, or of the first of its alternatives whose example needs nothing else to exist: neither a
    /// saved rule nor a provider of the operator.
    pub(super) fn example<'a>(&'a self, schema: &'a Value) -> Option<&'a Value> {
        let alternatives = schema["anyOf"].as_array().into_iter().flatten();
        let mut alternatives = alternatives.map(|one| self.resolve(one)).filter(|one| {
            let words = &one["properties"]["type"]["enum"];
            words.is_array() && words[0] != "id"
        });
        schema.get("example").or_else(|| alternatives.next()?.get("example"))
    }

    /// Valid and invalid values of a schema, on both sides of every bound, and of other types if `is_typed`: in a query
    /// everything is text.
    pub(super) fn cases(&self, schema: &Value, is_typed: bool) -> Vec<Case> {
        let schema = self.resolve(schema);
        let types = types(schema);
        let mut cases = Vec::new();
        let mut add = |value: Value, allowed: bool| cases.push(Case { value, allowed });
        if types.contains(&"integer") {
            if let Some(least) = schema["minimum"].as_i64() {
                add(json!(least), true);
                add(json!(least - 1), false);
            }
            if let Some(most) = schema["maximum"].as_i64() {
                add(json!(most), true);
                add(json!(most + 1), false);
            }
            add(json!(1.5), false);
            add(json!("x"), false);
        }
        let text = |length: u64| json!("a".repeat(usize::try_from(length).expect("small")));
        if let Some(least) = schema["minLength"].as_u64() {
            add(text(least), true);
            add(text(least - 1), false);
        }
        if let Some(most) = schema["maxLength"].as_u64() {
            add(text(most), true);
            add(text(most + 1), false);
        }
        let items = self.resolve(&schema["items"]);
        let (words, example) = (items["enum"].as_array(), self.example(items));
        let item = |n: usize| match (words, example) {
            (Some(words), _) => words[n % words.len()].clone(),
            (None, Some(example)) => example.clone(),
            (None, None) => json!(format!("i{n}")),
        };
        let items = |count: u64| (0..usize::try_from(count).expect("small")).map(item).collect::<Value>();
        // Objects without an example cannot be generated.
        let is_generated = example.is_some() || !self.resolve(&schema["items"])["properties"].is_object();
        if let Some(least) = schema["minItems"].as_u64() {
            add(items(least), true);
            add(items(least - 1), false);
        }
        if let Some(most) = schema["maxItems"].as_u64() {
            if is_generated {
                add(items(most), true);
            }
            add(items(most + 1), false);
        }
        for word in schema["enum"].as_array().into_iter().flatten() {
            add(word.clone(), true);
        }
        if schema["enum"].is_array() || schema["format"] == "date-time" {
            add(json!("nonsense"), false);
        }
        if is_typed && !types.is_empty() {
            add(Value::Null, types.contains(&"null"));
            for (kind, value) in [
                ("string", json!("x")),
                ("boolean", json!(true)),
                ("object", json!({})),
                ("array", json!([])),
            ] {
                if !types.contains(&kind) {
                    add(value, false);
                }
            }
            if types.contains(&"boolean") {
                for value in [json!(true), json!(false)] {
                    let words = schema["enum"].as_array();
                    add(value.clone(), words.is_none_or(|words| words.contains(&value)));
                }
            }
            if schema["additionalProperties"].is_object() {
                let is_list = schema["additionalProperties"]["type"] == "array";
                add(json!({"k": "v"}), !is_list);
                add(json!({"k": []}), is_list);
                add(json!({"k": 1}), false);
                add(json!({"k": null}), false);
            }
        }
        cases
    }

    /// Cases for every key of a body, put into `base`, at any depth.
    pub(super) fn body_cases(&self, schema: &Value, base: &Map<String, Value>) -> Vec<Case> {
        let schema = self.resolve(schema);
        let mut cases = Vec::new();
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            let inner = if self.resolve(property)["properties"].is_object() {
                self.body_cases(property, &Map::new())
            } else {
                Vec::new()
            };
            for case in self.cases(property, true).into_iter().chain(inner) {
                let mut body = base.clone();
                body.insert(key.clone(), case.value);
                cases.push(Case {
                    value: body.into(),
                    allowed: case.allowed,
                });
            }
        }
        for required in schema["required"].as_array().into_iter().flatten() {
            let mut body = base.clone();
            body.remove(required.as_str().expect("a key"));
            cases.push(Case {
                value: body.into(),
                allowed: false,
            });
        }
        cases
    }
}

fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}
