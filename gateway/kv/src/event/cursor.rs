//! A position in msgpack bytes. Iterative throughout: no input can exhaust the stack, and nothing is reserved
//! that the remaining bytes could not fill.

use super::DecodeError;
use rmp::Marker;

/// What a value is, its head read; scalars carry their value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Head<'a> {
    Nil,
    /// An integer as its 64-bit pattern, and whether it is negative.
    Int(u64, bool),
    Float(f64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Array(u32),
    Map(u32),
    /// Booleans and extensions: nothing that an event holds.
    Other,
}

#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

type Result<T> = std::result::Result<T, DecodeError>;

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Cursor { rest: bytes }
    }

    /// Bytes left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// How many of `claimed` items to reserve room for: each takes at least a byte.
    pub(super) fn plausible(&self, claimed: u32) -> usize {
        self.left().min(claimed as usize)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(n).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    #[inline]
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn signed(n: i64) -> Head<'a> {
        Head::Int(n as u64, n < 0)
    }

    /// Reads a value; of an array or a map only the head.
    pub(super) fn head(&mut self) -> Result<Head<'a>> {
        let [first] = self.fixed()?;
        Ok(match Marker::from_u8(first) {
            Marker::FixPos(n) => Head::Int(n.into(), false),
            Marker::FixNeg(n) => Self::signed(n.into()),
            Marker::U8 => Head::Int(u8::from_be_bytes(self.fixed()?).into(), false),
            Marker::U16 => Head::Int(u16::from_be_bytes(self.fixed()?).into(), false),
            Marker::U32 => Head::Int(u32::from_be_bytes(self.fixed()?).into(), false),
            Marker::U64 => Head::Int(u64::from_be_bytes(self.fixed()?), false),
            Marker::I8 => Self::signed(i8::from_be_bytes(self.fixed()?).into()),
            Marker::I16 => Self::signed(i16::from_be_bytes(self.fixed()?).into()),
            Marker::I32 => Self::signed(i32::from_be_bytes(self.fixed()?).into()),
            Marker::I64 => Self::signed(i64::from_be_bytes(self.fixed()?)),
            Marker::F32 => Head::Float(f32::from_be_bytes(self.fixed()?).into()),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.fixed()?)),
            Marker::Null => Head::Nil,
            Marker::True | Marker::False | Marker::Reserved => Head::Other,
            Marker::FixStr(n) => Head::Text(self.take(n.into())?),
            Marker::Str8 => Head::Text(self.sized8()?),
            Marker::Str16 => Head::Text(self.sized16()?),
            Marker::Str32 => Head::Text(self.sized32()?),
            Marker::Bin8 => Head::Bytes(self.sized8()?),
            Marker::Bin16 => Head::Bytes(self.sized16()?),
            Marker::Bin32 => Head::Bytes(self.sized32()?),
            Marker::FixArray(n) => Head::Array(n.into()),
            Marker::Array16 => Head::Array(u16::from_be_bytes(self.fixed()?).into()),
            Marker::Array32 => Head::Array(u32::from_be_bytes(self.fixed()?)),
            Marker::FixMap(n) => Head::Map(n.into()),
            Marker::Map16 => Head::Map(u16::from_be_bytes(self.fixed()?).into()),
            Marker::Map32 => Head::Map(u32::from_be_bytes(self.fixed()?)),
            // an extension's type byte comes before its data
            Marker::FixExt1 => self.other(2)?,
            Marker::FixExt2 => self.other(3)?,
            Marker::FixExt4 => self.other(5)?,
            Marker::FixExt8 => self.other(9)?,
            Marker::FixExt16 => self.other(17)?,
            Marker::Ext8 => {
                let n = u8::from_be_bytes(self.fixed()?);
                self.other(u64::from(n) + 1)?
            }
            Marker::Ext16 => {
                let n = u16::from_be_bytes(self.fixed()?);
                self.other(u64::from(n) + 1)?
            }
            Marker::Ext32 => {
                let n = u32::from_be_bytes(self.fixed()?);
                self.other(u64::from(n) + 1)?
            }
        })
    }

    fn sized8(&mut self) -> Result<&'a [u8]> {
        let n = u8::from_be_bytes(self.fixed()?);
        self.take(n.into())
    }

    fn sized16(&mut self) -> Result<&'a [u8]> {
        let n = u16::from_be_bytes(self.fixed()?);
        self.take(n.into())
    }

    fn sized32(&mut self) -> Result<&'a [u8]> {
        let n = u32::from_be_bytes(self.fixed()?);
        self.take(n as usize)
    }

    fn other(&mut self, data: u64) -> Result<Head<'a>> {
        self.take(usize::try_from(data).map_err(|_| DecodeError::Truncated)?)?;
        Ok(Head::Other)
    }

    /// Passes over one value, whatever it holds; returns its bytes.
    pub(super) fn skip(&mut self) -> Result<&'a [u8]> {
        let whole = self.rest;
        let mut pending = 1_u64;
        while pending > 0 {
            pending -= 1;
            pending += match self.head()? {
                Head::Array(n) => u64::from(n),
                Head::Map(n) => 2 * u64::from(n),
                _ => 0,
            };
            // every pending value takes a byte at least, so this also keeps `pending` from overflowing
            if pending > self.left() as u64 {
                return Err(DecodeError::Truncated);
            }
        }
        Ok(&whole[..whole.len() - self.left()])
    }

    /// A u32 in any integer form; `None` for anything else.
    #[inline]
    pub(super) fn token(&mut self) -> Result<Option<u32>> {
        match *self.rest {
            [0xcd, a, b, ref rest @ ..] => {
                self.rest = rest;
                Ok(Some(u16::from_be_bytes([a, b]).into()))
            }
            [0xce, a, b, c, d, ref rest @ ..] => {
                self.rest = rest;
                Ok(Some(u32::from_be_bytes([a, b, c, d])))
            }
            _ => match self.head()? {
                Head::Int(n, false) => Ok(u32::try_from(n).ok()),
                _ => Ok(None),
            },
        }
    }
}
