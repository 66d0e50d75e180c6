//! An example of a tier of your own: a request header names the endpoint.
