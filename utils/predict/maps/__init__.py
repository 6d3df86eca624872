"""Positions of findings on the map: metadata of photographs, camera model, assets, GeoJSON, CSV and KML.

Angles in degrees, lengths in metres, positions on WGS84. Directions are north-east-down (NED) unless said otherwise.
"""
