//! `botix:webhook` 1.0 as data: what a plugin may import and must export, to the last field.
//!
//! The text that authors build against is `wit/webhook.wit`; these tables say the same to the upload
//! check, which compares them with a component's types structurally (names of types do not count,
//! names of fields do). The comparison is driven by the table, never by the upload, so its cost is
//! bounded however deep the uploaded types are. A 1.x component passes as long as it uses only what
//! stands here; what 1.1 adds will be added here too. Tests build components from the WIT file
//! and hold the tables against them.

use wasmparser::component_types::{ComponentDefinedType, ComponentFuncTypeId, ComponentValType};
use wasmparser::{PrimitiveValType, types::TypesRef};

/// The interface that the platform provides.
pub(super) const HOST: &str = "botix:webhook/host@1.0.0";
/// The interface of shared types; it has no functions.
pub(super) const TYPES: &str = "botix:webhook/types@1.0.0";
/// The export that turns an event into a request.
pub(super) const TRANSFORMER: &str = "botix:webhook/transformer@1.0.0";
/// The export that adds headers to a final body.
pub(super) const SIGNER: &str = "botix:webhook/signer@1.0.0";

/// The functions of [`HOST`].
pub(super) const HOST_FUNCTIONS: &[Function] = &[
    Function {
        name: "log",
        wit: "log: func(level: level, message: string)",
        params: &[
            ("level", Shape::Enum(&["debug", "info", "warn", "error"])),
            ("message", STRING),
        ],
        result: None,
    },
    Function {
        name: "config",
        wit: "config: func() -> string",
        params: &[],
        result: Some(STRING),
    },
    Function {
        name: "now",
        wit: "now: func() -> u64",
        params: &[],
        result: Some(Shape::Primitive(PrimitiveValType::U64)),
    },
    Function {
        name: "hmac-sha256",
        wit: "hmac-sha256: func(key-name: string, message: list<u8>) -> result<list<u8>, string>",
        params: &[("key-name", STRING), ("message", BYTES)],
        result: Some(Shape::Result(&BYTES, &STRING)),
    },
];

/// The function of [`TRANSFORMER`].
pub(super) const TRANSFORM: Function = Function {
    name: "transform",
    wit: "transform: func(event: event, delivery: delivery) -> result<outcome, string>",
    params: &[("event", EVENT), ("delivery", DELIVERY)],
    result: Some(Shape::Result(&OUTCOME, &STRING)),
};

/// The function of [`SIGNER`].
pub(super) const SIGN: Function = Function {
    name: "sign",
    wit: "sign: func(event: event, delivery: delivery, body: string) -> result<list<header>, string>",
    params: &[("event", EVENT), ("delivery", DELIVERY), ("body", STRING)],
    result: Some(Shape::Result(&HEADERS, &STRING)),
};

const STRING: Shape = Shape::Primitive(PrimitiveValType::String);
const BYTES: Shape = Shape::List(&Shape::Primitive(PrimitiveValType::U8));
const EVENT: Shape = Shape::Record(&[
    ("id", STRING),
    ("event-type", STRING),
    ("timestamp", STRING),
    ("body", STRING),
]);
const DELIVERY: Shape = Shape::Record(&[
    ("endpoint-id", STRING),
    ("url", STRING),
    ("attempt", Shape::Primitive(PrimitiveValType::U32)),
    ("request-id", STRING),
]);
const HEADERS: Shape = Shape::List(&Shape::Record(&[("name", STRING), ("value", STRING)]));
const REQUEST: Shape = Shape::Record(&[("body", STRING), ("headers", HEADERS)]);
const OUTCOME: Shape = Shape::Variant(&[("deliver", REQUEST), ("drop", STRING)]);

/// A function's name and type.
pub(super) struct Function {
    /// As exported or imported.
    pub(super) name: &'static str,
    /// Its line in the WIT file, for messages.
    pub(super) wit: &'static str,
    params: &'static [(&'static str, Shape)],
    result: Option<Shape>,
}

impl Function {
    /// Whether a component's function has this type.
    pub(super) fn is(&self, types: TypesRef<'_>, id: ComponentFuncTypeId) -> bool {
        let found = &types[id];
        !found.async_
            && found.params.len() == self.params.len()
            && found
                .params
                .iter()
                .zip(self.params)
                .all(|((name, ty), (expected, shape))| {
                    name.as_str() == *expected && shape.is(types, *ty)
                })
            && match (&found.result, &self.result) {
                (Some(ty), Some(shape)) => shape.is(types, *ty),
                (None, None) => true,
                _ => false,
            }
    }
}

/// The kinds of type that the interface uses.
enum Shape {
    Primitive(PrimitiveValType),
    List(&'static Shape),
    Record(&'static [(&'static str, Shape)]),
    Variant(&'static [(&'static str, Shape)]),
    Enum(&'static [&'static str]),
    Result(&'static Shape, &'static Shape),
}

impl Shape {
    fn is(&self, types: TypesRef<'_>, ty: ComponentValType) -> bool {
        let defined = match ty {
            ComponentValType::Primitive(found) => {
                return matches!(self, Self::Primitive(expected) if found == *expected);
            }
            ComponentValType::Type(id) => &types[id],
        };
        match (self, defined) {
            (Self::Primitive(expected), ComponentDefinedType::Primitive(found)) => {
                found == expected
            }
            (Self::List(shape), ComponentDefinedType::List { element, .. }) => {
                shape.is(types, *element)
            }
            (Self::Record(fields), ComponentDefinedType::Record(found)) => {
                found.fields.len() == fields.len()
                    && found
                        .fields
                        .iter()
                        .zip(*fields)
                        .all(|((name, ty), (expected, shape))| {
                            name.as_str() == *expected && shape.is(types, *ty)
                        })
            }
            (Self::Variant(cases), ComponentDefinedType::Variant(found)) => {
                found.cases.len() == cases.len()
                    && found
                        .cases
                        .iter()
                        .zip(*cases)
                        .all(|((name, case), (expected, shape))| {
                            name.as_str() == *expected
                                && case.ty.is_some_and(|ty| shape.is(types, ty))
                        })
            }
            (Self::Enum(names), ComponentDefinedType::Enum(found)) => {
                found.len() == names.len()
                    && found
                        .iter()
                        .zip(*names)
                        .all(|(name, expected)| name.as_str() == *expected)
            }
            (
                Self::Result(ok, error),
                ComponentDefinedType::Result {
                    ok: found_ok, err, ..
                },
            ) => {
                found_ok.is_some_and(|ty| ok.is(types, ty))
                    && err.is_some_and(|ty| error.is(types, ty))
            }
            _ => false,
        }
    }
}
