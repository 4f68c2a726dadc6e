//! What an upload would be told at once, without compiling it.
//!
//! An upload passes when it is a valid component, imports nothing but `botix:webhook` functions of
//! the types that 1.0 gives them, and exports a transformer, a signer or both, typed likewise. The
//! refusal names the offending item the way it stands in the component, because that is what its
//! author can search for. Validation runs with [`FEATURES`], the very set and the very parser that
//! the engine compiles with, so that what passes here fails later only on size.
//!
//! The bytes are hostile: nothing here panics on them (properties and a mutation test say so), and
//! should the validator do so after all, the upload is refused and the server goes on. The cost is
//! linear in the size, some 10 ms per megabyte: run it where blocking is allowed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use wasmparser::component_types::{ComponentAnyTypeId, ComponentEntityType};
use wasmparser::types::{Types, TypesRef};
use wasmparser::{Parser, Payload, Validator, WasmFeatures};

use super::interface::{self, Function};

/// The WebAssembly proposals that a plugin may use: everything standard but memory64 and relaxed
/// SIMD (machine-dependent results), threads, exceptions and garbage collection (not built in).
pub(super) const FEATURES: WasmFeatures = WasmFeatures::WASM3
    .difference(WasmFeatures::MEMORY64)
    .difference(WasmFeatures::RELAXED_SIMD)
    .difference(WasmFeatures::THREADS)
    .difference(WasmFeatures::EXCEPTIONS)
    .difference(WasmFeatures::GC_TYPES)
    .union(WasmFeatures::COMPONENT_MODEL);

/// Which of the two functions a plugin has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exports {
    /// It exports `botix:webhook/transformer`.
    pub transform: bool,
    /// It exports `botix:webhook/signer`.
    pub sign: bool,
}

/// Why an upload is not a plugin. The text is public: it is the `detail` of `PLUGIN_INVALID`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not WebAssembly in binary form.
    #[error("the file is not a WebAssembly component: it does not begin with the component header")]
    NotWasm,
    /// A core module, which a component is made from.
    #[error(
        "the file is a core WebAssembly module, not a component; \
         `wasm-tools component new` makes one of it"
    )]
    CoreModule,
    /// Broken, or uses a proposal that plugins may not use.
    #[error("the file is not a valid component: {0}")]
    Invalid(String),
    /// An import that the platform does not provide.
    #[error(
        "the component imports `{name}`, which plugins are not given: \
         only the functions of `botix:webhook/host@1.0.0` are{hint}"
    )]
    Import {
        /// The import as it is written in the component; `#` sets off a function of an interface.
        name: String,
        /// What to do about it, where that is known.
        hint: &'static str,
    },
    /// A host function imported with a type that it does not have.
    #[error("the component imports `{name}` with another type than `{expected}`")]
    ImportType {
        /// The import.
        name: String,
        /// Its line in the WIT file.
        expected: &'static str,
    },
    /// Neither of the two exports.
    #[error(
        "the component exports neither `botix:webhook/transformer@1.0.0` \
         nor `botix:webhook/signer@1.0.0`{0}"
    )]
    NoExport(String),
    /// An interface of the right name that lacks its function.
    #[error("the component exports `{interface}` without its function `{expected}`")]
    ExportMissing {
        /// The interface.
        interface: String,
        /// The function's line in the WIT file.
        expected: &'static str,
    },
    /// An export of the right name that is not what it should be.
    #[error("the component exports `{name}` with another type than `{expected}`")]
    ExportType {
        /// The export.
        name: String,
        /// Its line in the WIT file.
        expected: &'static str,
    },
}

/// Reads an upload and says what it exports, or why it is refused.
pub fn inspect(wasm: &[u8]) -> Result<Exports, Refusal> {
    if Parser::is_core_wasm(wasm) {
        return Err(Refusal::CoreModule);
    }
    if !Parser::is_component(wasm) {
        return Err(Refusal::NotWasm);
    }
    catch_unwind(AssertUnwindSafe(|| inspect_component(wasm)))
        .unwrap_or_else(|_| Err(Refusal::Invalid("the validator could not read it".into())))
}

fn inspect_component(wasm: &[u8]) -> Result<Exports, Refusal> {
    let types = Validator::new_with_features(FEATURES)
        .validate_all(wasm)
        .map_err(invalid)?;
    let names = Names::read(wasm).map_err(invalid)?;
    for name in names.imports {
        check_import(&types, name)?;
    }
    let exports = Exports {
        transform: check_export(
            &types,
            &names.exports,
            interface::TRANSFORMER,
            &interface::TRANSFORM,
        )?,
        sign: check_export(&types, &names.exports, interface::SIGNER, &interface::SIGN)?,
    };
    if exports.transform || exports.sign {
        return Ok(exports);
    }
    let other_version = names
        .exports
        .iter()
        .find(|name| name.starts_with("botix:webhook/"))
        .map_or(String::new(), |name| {
            format!("; it exports `{}`", short(name))
        });
    Err(Refusal::NoExport(other_version))
}

fn invalid(error: impl std::fmt::Display) -> Refusal {
    Refusal::Invalid(short(&error.to_string()))
}

/// What the outermost component imports and exports, in order.
#[derive(Default)]
struct Names<'a> {
    imports: Vec<&'a str>,
    exports: Vec<&'a str>,
}

impl<'a> Names<'a> {
    fn read(wasm: &'a [u8]) -> wasmparser::Result<Self> {
        let mut names = Self::default();
        let mut depth = 0_u32;
        for payload in Parser::new(0).parse_all(wasm) {
            match payload? {
                Payload::Version { .. } => depth += 1,
                Payload::End(_) => depth = depth.saturating_sub(1),
                Payload::ComponentImportSection(section) if depth == 1 => {
                    for import in section {
                        names.imports.push(import?.name.name);
                    }
                }
                Payload::ComponentExportSection(section) if depth == 1 => {
                    for export in section {
                        names.exports.push(export?.name.name);
                    }
                }
                _ => {}
            }
        }
        Ok(names)
    }
}

fn check_import(types: &Types, name: &str) -> Result<(), Refusal> {
    let functions = if is_version_1_of(name, interface::HOST) {
        interface::HOST_FUNCTIONS
    } else if is_version_1_of(name, interface::TYPES) {
        &[]
    } else {
        return Err(refused_import(name));
    };
    let types = types.as_ref();
    let Some(ComponentEntityType::Instance(instance)) =
        types.component_item_for_import(name).map(|item| item.ty)
    else {
        return Err(refused_import(name));
    };
    for (member, item) in &types[instance].exports {
        let full_name = format!("{name}#{member}");
        match item.ty {
            ComponentEntityType::Type { created, .. } if !is_resource(created) => {}
            ComponentEntityType::Func(id) => {
                let Some(function) = functions.iter().find(|f| f.name == member) else {
                    return Err(refused_import(&full_name));
                };
                if !function.is(types, id) {
                    return Err(Refusal::ImportType {
                        name: short(&full_name),
                        expected: function.wit,
                    });
                }
            }
            _ => return Err(refused_import(&full_name)),
        }
    }
    Ok(())
}

fn is_resource(id: ComponentAnyTypeId) -> bool {
    matches!(id, ComponentAnyTypeId::Resource(_))
}

fn refused_import(name: &str) -> Refusal {
    Refusal::Import {
        name: short(name),
        hint: if name.starts_with("wasi:") {
            "; there are no files, sockets, clocks, randomness or environment, \
             and most toolchains can leave WASI out (`--stub-wasi`)"
        } else {
            ""
        },
    }
}

/// Whether `interface` is exported; an error when it is and its function is not what it should be.
///
/// The same choice among versions as the engine's: 1.0.0 itself, else whatever 1.x there is.
fn check_export(
    types: &Types,
    exports: &[&str],
    interface: &str,
    function: &Function,
) -> Result<bool, Refusal> {
    let candidates: Vec<&str> = if exports.contains(&interface) {
        vec![interface]
    } else {
        exports
            .iter()
            .copied()
            .filter(|name| is_version_1_of(name, interface))
            .collect()
    };
    for name in &candidates {
        match exports_function(types.as_ref(), name, function) {
            Some(true) => {}
            Some(false) => {
                return Err(Refusal::ExportType {
                    name: short(&format!("{name}#{}", function.name)),
                    expected: function.wit,
                });
            }
            None => {
                return Err(Refusal::ExportMissing {
                    interface: short(name),
                    expected: function.wit,
                });
            }
        }
    }
    Ok(!candidates.is_empty())
}

/// Whether an export is an instance whose function has the right type; `None` where it has no such function.
fn exports_function(types: TypesRef<'_>, interface: &str, function: &Function) -> Option<bool> {
    let Some(ComponentEntityType::Instance(instance)) = types
        .component_item_for_export(interface)
        .map(|item| item.ty)
    else {
        return Some(false);
    };
    let item = types[instance].exports.get(function.name)?;
    Some(matches!(item.ty, ComponentEntityType::Func(id) if function.is(types, id)))
}

/// Whether `name` is a released 1.x of the interface that `v1` (`…@1.0.0`) names.
fn is_version_1_of(name: &str, v1: &str) -> bool {
    let (Some((name, version)), Some((expected, _))) = (name.split_once('@'), v1.split_once('@'))
    else {
        return false;
    };
    let numbers: Vec<&str> = version.split('.').collect();
    name == expected
        && numbers.len() == 3
        && numbers[0] == "1"
        && numbers
            .iter()
            .all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Text from an upload, cut to a length that fits in an error message.
fn short(text: &str) -> String {
    super::truncated(text, 300)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plugins::fixtures;

    fn refusal(wasm: &[u8]) -> String {
        inspect(wasm).unwrap_err().to_string()
    }

    #[test]
    fn a_component_of_each_world_says_what_it_exports() {
        let both = Exports {
            transform: true,
            sign: true,
        };
        assert_eq!(
            inspect(&fixtures::echo()),
            Ok(Exports {
                sign: false,
                ..both
            })
        );
        assert_eq!(
            inspect(&fixtures::sign_only()),
            Ok(Exports {
                transform: false,
                ..both
            })
        );
        assert_eq!(inspect(&fixtures::both()), Ok(both));
    }

    #[test]
    fn every_host_function_may_be_imported() {
        assert!(inspect(&fixtures::every_import()).is_ok());
    }

    #[test]
    fn a_later_1_x_that_uses_only_what_1_0_has_is_accepted() {
        assert!(inspect(&fixtures::built_against("1.4.2")).is_ok());
    }

    #[test]
    fn another_major_version_is_refused_by_name() {
        assert!(refusal(&fixtures::built_against("2.0.0")).contains("botix:webhook/host@2.0.0"));
    }

    #[test]
    fn text_and_core_modules_are_told_apart() {
        assert_eq!(inspect(b"(component)"), Err(Refusal::NotWasm));
        assert_eq!(inspect(b""), Err(Refusal::NotWasm));
        assert_eq!(inspect(&fixtures::core_module()), Err(Refusal::CoreModule));
    }

    #[test]
    fn a_wasi_import_is_refused_with_its_name() {
        let text = refusal(&fixtures::imports_wasi());
        assert!(text.contains("`wasi:cli/environment@0.2.0`"), "{text}");
    }

    #[test]
    fn an_unknown_host_function_is_refused_with_its_name() {
        let text = refusal(&fixtures::imports_unknown_function());
        assert!(text.contains("`botix:webhook/host@1.0.0#exec`"), "{text}");
    }

    #[test]
    fn a_host_function_of_another_type_is_refused_with_its_name() {
        let text = refusal(&fixtures::imports_mistyped());
        assert!(text.contains("`botix:webhook/host@1.0.0#now`"), "{text}");
        assert!(text.contains("now: func() -> u64"), "{text}");
    }

    #[test]
    fn a_mistyped_export_is_refused_with_its_name_and_its_proper_type() {
        let text = refusal(&fixtures::exports_mistyped());
        assert!(
            text.contains("`botix:webhook/transformer@1.0.0#transform`"),
            "{text}"
        );
        assert!(text.contains("result<outcome, string>"), "{text}");
    }

    #[test]
    fn an_interface_without_its_function_is_refused_with_the_name_that_is_missing() {
        let text = refusal(&fixtures::exports_misnamed());
        assert!(
            text.contains("`botix:webhook/transformer@1.0.0` without"),
            "{text}"
        );
        assert!(text.contains("`transform: func("), "{text}");
    }

    #[test]
    fn a_component_without_either_export_is_refused() {
        let text = refusal(&fixtures::exports_nothing());
        assert!(text.contains("exports neither"), "{text}");
    }

    #[test]
    fn a_prerelease_is_not_1_x() {
        assert!(is_version_1_of(
            "botix:webhook/host@1.12.0",
            interface::HOST
        ));
        for version in [
            "1",
            "1.0",
            "1.0.0-rc1",
            "1.0.0+b",
            "0.1.0",
            "11.0.0",
            "1.a.0",
            "1..0",
        ] {
            let name = format!("botix:webhook/host@{version}");
            assert!(!is_version_1_of(&name, interface::HOST), "{name}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = inspect(&bytes);
            let mut component = b"\0asm\x0d\0\x01\0".to_vec();
            component.extend(bytes);
            let _ = inspect_component(&component);
        }

        #[test]
        fn mutated_components_never_panic(
            at in any::<proptest::sample::Index>(),
            byte in any::<u8>(),
            cut in proptest::option::of(any::<proptest::sample::Index>()),
        ) {
            let mut bytes = fixtures::both();
            let index = at.index(bytes.len());
            bytes[index] = byte;
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            let _ = inspect_component(&bytes);
        }
    }
}
