//! Addresses that are not public: closed unless the operator opens them.
