//! What every back end must do; run by each back end's tests against its own way of making pairs.
