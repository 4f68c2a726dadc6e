//! What a tenant may set. An unknown member is an error: a misspelt `drop` must not leak a name.

use serde::Deserialize;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Members to remove from `data`, at any depth; ASCII case does not matter.
    pub drop: Vec<String>,
    /// Event types of which nothing is sent.
    pub drop_event_types: Vec<String>,
    /// The host's name of the key to sign with; `endpoint` is the endpoint's own secret.
    pub key: String,
    pub signature_header: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            drop: ["phone", "email", "name"].map(String::from).to_vec(),
            drop_event_types: Vec::new(),
            key: "endpoint".into(),
            signature_header: "X-Acme-Signature".into(),
        }
    }
}

impl Config {
    pub fn parse(json: &str) -> Result<Self, String> {
        serde_json::from_str(json).map_err(|error| format!("plugin configuration: {error}"))
    }

    pub fn drops(&self, event_type: &str) -> bool {
        self.drop_event_types
            .iter()
            .any(|dropped| dropped == event_type)
    }
}

#[cfg(test)]
mod tests {
    use super::Config;

    #[test]
    fn an_empty_configuration_is_the_default() {
        let config = Config::parse("{}").unwrap();
        assert_eq!(config.drop, ["phone", "email", "name"]);
        assert_eq!(config.key, "endpoint");
        assert_eq!(config.signature_header, "X-Acme-Signature");
        assert!(!config.drops("contact.created"));
    }

    #[test]
    fn every_member_overrides_its_default() {
        let config = Config::parse(
            r#"{"drop":[],"drop_event_types":["x.y"],"key":"k","signature_header":"H"}"#,
        )
        .unwrap();
        assert!(config.drop.is_empty());
        assert!(config.drops("x.y") && !config.drops("x.yz"));
        assert_eq!((&*config.key, &*config.signature_header), ("k", "H"));
    }

    #[test]
    fn a_misspelt_member_is_refused_by_name() {
        let error = Config::parse(r#"{"dorp":["phone"]}"#).err().unwrap();
        assert!(error.contains("`dorp`"), "{error}");
    }
}
